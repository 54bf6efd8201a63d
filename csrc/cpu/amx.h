// AMX, which a processor may announce though a program cannot use it.
#pragma once

namespace eqxcallback::cpu {

// Asks the system for tiles, for all threads of this process, and has a child try them: a hypervisor may announce what
// raises SIGILL. True if this process can multiply tiles of bf16.
bool has_amx();

}  // namespace eqxcallback::cpu
