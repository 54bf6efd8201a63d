// What is known of this machine's processor beside its instructions.
#pragma once

namespace eqxcallback::cpu {

// True if a stream from memory is read faster when it is prefetched into the first cache than into the second. A
// processor has few places for lines that are on their way to the first one, and nothing that it says of itself tells
// how many: so it is true of those alone on which it was measured.
bool prefetches_into_first_cache();

}  // namespace eqxcallback::cpu
