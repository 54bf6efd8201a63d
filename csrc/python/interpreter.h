// Tells if there is a Python to call.
#pragma once

#include <Python.h>
#ifdef Py_LIMITED_API
#include <dlfcn.h>
#endif

namespace eqxcallback {

inline bool python_is_finalizing() {
#ifdef Py_LIMITED_API
  // Python 3.12 and 3.13 export the function under different names, and the stable ABI of 3.12 has neither.
  static const auto is_finalizing = [] {
    void* symbol = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    if (symbol == nullptr) symbol = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    return reinterpret_cast<int (*)()>(symbol);
  }();
  return is_finalizing != nullptr && is_finalizing() != 0;
#elif PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// True while Python runs and is not on its way out. False in threads that outlive the interpreter.
inline bool python_is_running() { return Py_IsInitialized() && !python_is_finalizing(); }

}  // namespace eqxcallback
