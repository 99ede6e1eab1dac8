// The 64-bit finalizer of MurmurHash3 (Austin Appleby, public domain): a bijection of 64-bit words
// in which every input bit flips every output bit with probability near one half. It is the one
// hash of a key in gmeta: its top bits choose the shard, its low bits the slot.

#ifndef GMETA_OPS_COMMON_MURMUR_HASH3_H_
#define GMETA_OPS_COMMON_MURMUR_HASH3_H_

#include <cstdint>

#include "ops/common/host_device.h"

namespace gmeta {

GMETA_HOST_DEVICE inline uint64_t MurmurHash3(int64_t key) {
  uint64_t h = static_cast<uint64_t>(key);
  h = (h ^ (h >> 33)) * 0xff51afd7ed558ccdULL;
  h = (h ^ (h >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return h ^ (h >> 33);
}

}  // namespace gmeta

#endif  // GMETA_OPS_COMMON_MURMUR_HASH3_H_
