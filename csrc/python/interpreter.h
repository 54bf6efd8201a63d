// Whether there is a Python to call.
#pragma once

#include <Python.h>

namespace eqxcallback {

// Python is there and not on its way out. False in threads that outlive the interpreter.
inline bool python_is_running() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() && !Py_IsFinalizing();
#else
  return Py_IsInitialized() && !_Py_IsFinalizing();
#endif
}

}  // namespace eqxcallback
