// How the rows of sm90_decode.cu travel: bits, 0 for the usual way.
#pragma once

namespace gdn {

constexpr int kLate = 1;    // stores when all of a tile is computed, not as soon as its rows are
constexpr int kCached = 2;  // loads by way of L1

}  // namespace gdn
