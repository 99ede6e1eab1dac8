// Admission as policies: which missing keys of an inserting lookup get a row. For a rejected key,
// the lookup returns the initial row and stores nothing, and a later gradient updates nothing.
//
// A policy is a struct of settings with
//   State Begin(size_t shards) const;    the state of one shard out of that many
// and its State has
//   bool Admit(int64_t key, uint32_t step);   called once for each occurrence of a missing key, in
//                                             the order of the batch; may count it
//   void Prefetch(int64_t key) const;         prefetches the memory that Admit will read
//   size_t bytes() const; void Clear();
//   and what checkpoints carry: exact counters and the filter's bytes (see Stateless, which has
//   neither)
// and the policy is listed in Admission and in MakeAdmission. Each shard has its own state and uses
// it under the shard's lock, so a decision depends on the shard's keys in their order, never on
// threads.
//
// By count. A key is admitted at the miss that brings its count to the threshold. Counts of keys
// that are not admitted yet are kept in one of two ways:
//   exactly (AdmitByCount): a KeyIndex whose values are counts takes 19 to 27 bytes for each
//     waiting key, 46 while it grows. Admission frees the counter, so after an eviction the key
//     must be counted up to the threshold again.
//   in a counting Bloom filter (AdmitByFilter; L. Fan et al., "Summary Cache", 2000) of one-byte
//     counters with conservative update (C. Estan and G. Varghese, 2002): a key's count is the
//     least of its k counters, and a miss raises only those counters that equal it. Counts are
//     never too low. A count is too high only if other keys have raised all k counters. After n
//     keys in m counters, the probability of that is at most (1 - exp(-k n / m))^k; m is chosen so
//     that this is the stated error at the stated n. The filter forgets nothing: a key whose row
//     was evicted is admitted again at its next miss.
//
// To merge two filters of one size, take the larger value of each counter. No count is then too
// low, because each of a key's counters is at least what it was. No count is higher than in a
// single filter that had counted the misses of both: a filter never lowers a counter, and if one
// filter's counters are all at least another's, they remain so when both get the same update.
// Hence the stated error holds for the union. If no key was counted in both filters, as is the case
// with the filters of different ranks, nothing is lost. To add an exact count to a filter, raise
// the key's counters to it.
//
// By chance (AdmitByChance). The decision is a pure function of (seed, key, step): a key that is
// missing at several steps has an independent chance at each, and a lookup repeated at the same
// step has the same outcome. So the number of steps until admission is geometric, and no count is
// kept.

#ifndef GMETA_OPS_TABLE_CORE_ADMISSION_H_
#define GMETA_OPS_TABLE_CORE_ADMISSION_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/common/prefetch.h"
#include "ops/table/core/index/key_index.h"

namespace gmeta {

// Empty defaults for the parts of a state that a policy may not need.
struct Stateless {
  void Prefetch(int64_t) const {}
  size_t bytes() const { return 0; }
  void Clear() {}

  uint64_t counters() const { return 0; }
  template <class Visit>
  void ForEachCounter(const Visit&) const {}
  void SetCounter(int64_t, uint32_t) {}
  uint8_t* filter() { return nullptr; }
  size_t filter_bytes() const { return 0; }
};

struct AdmitAll {
  struct State : Stateless {
    bool Admit(int64_t, uint32_t) { return true; }
  };
  State Begin(size_t) const { return {}; }
};

struct AdmitByCount {
  uint32_t threshold;

  class State : public Stateless {
   public:
    explicit State(uint32_t threshold) : threshold_(threshold) {}

    bool Admit(int64_t key, uint32_t) {
      const uint64_t hash = MurmurHash3(key);
      uint32_t* count = counts_.FindValue(key, hash);
      if ((count == nullptr ? 1 : *count + 1) >= threshold_) {
        if (count != nullptr) counts_.Erase(key, hash);
        return true;
      }
      if (count == nullptr) {
        counts_.Insert(key, hash, 1);
      } else {
        ++*count;
      }
      return false;
    }

    void Prefetch(int64_t key) const { counts_.Prefetch(MurmurHash3(key)); }
    size_t bytes() const { return counts_.bytes(); }
    void Clear() { counts_.Clear(); }

    uint64_t counters() const { return counts_.size(); }
    // Calls visit(key, count) for every waiting key.
    template <class Visit>
    void ForEachCounter(const Visit& visit) const {
      counts_.ForEach(visit);
    }
    void SetCounter(int64_t key, uint32_t count) {
      const uint64_t hash = MurmurHash3(key);
      uint32_t* old = counts_.FindValue(key, hash);
      if (old != nullptr) {
        *old = count;
      } else {
        counts_.Insert(key, hash, count);
      }
    }

   private:
    uint32_t threshold_;
    KeyIndex counts_;
  };
  State Begin(size_t) const { return State(threshold); }
};

struct AdmitByFilter {
  uint32_t threshold;       // at most 255
  uint64_t capacity;        // n: the error holds up to this many distinct keys of the whole table
  double counters_per_key;  // m / n
  uint32_t hashes;          // k

  class State : public Stateless {
   public:
    State(const AdmitByFilter& settings, size_t counters)
        : threshold_(settings.threshold), hashes_(settings.hashes), counters_(counters) {}

    bool Admit(int64_t key, uint32_t) {
      uint32_t least = UINT8_MAX;
      ForEachPlace(key, [&](size_t at) { least = std::min<uint32_t>(least, counters_[at]); });
      const uint8_t count = static_cast<uint8_t>(std::min(least + 1, threshold_));
      ForEachPlace(key, [&](size_t at) { counters_[at] = std::max(counters_[at], count); });
      return count >= threshold_;
    }

    void Prefetch(int64_t key) const {
      ForEachPlace(key, [&](size_t at) { gmeta::Prefetch<Intent::kWrite>(&counters_[at]); });
    }
    size_t bytes() const { return counters_.size(); }
    void Clear() { std::fill(counters_.begin(), counters_.end(), uint8_t{0}); }

    void SetCounter(int64_t key, uint32_t count) {
      const uint8_t least = static_cast<uint8_t>(std::min(count, threshold_));
      ForEachPlace(key, [&](size_t at) { counters_[at] = std::max(counters_[at], least); });
    }
    uint8_t* filter() { return counters_.data(); }
    size_t filter_bytes() const { return counters_.size(); }

   private:
    // Double hashing (A. Kirsch and M. Mitzenmacher, 2006). Both hashes are of salted keys, because
    // the hashes of the plain keys have the same top bits in the whole shard.
    template <class Visit>
    void ForEachPlace(int64_t key, const Visit& visit) const {
      const uint64_t k = static_cast<uint64_t>(key);
      uint64_t hash = MurmurHash3(static_cast<int64_t>(k ^ 0x9e3779b97f4a7c15ULL));
      const uint64_t step = MurmurHash3(static_cast<int64_t>(k ^ 0xd1b54a32d192ed03ULL)) | 1;
      for (uint32_t i = 0; i < hashes_; ++i, hash += step) {
        visit(static_cast<size_t>(static_cast<unsigned __int128>(hash) * counters_.size() >> 64));
      }
    }

    uint32_t threshold_;
    uint32_t hashes_;
    std::vector<uint8_t> counters_;
  };
  State Begin(size_t shards) const {
    const uint64_t share = (capacity + shards - 1) / shards;
    return State(*this,
                 static_cast<size_t>(std::ceil(static_cast<double>(share) * counters_per_key)));
  }
};

struct AdmitByChance {
  double probability;
  uint64_t seed;

  class State : public Stateless {
   public:
    explicit State(const AdmitByChance& settings)
        : salt_(MurmurHash3(static_cast<int64_t>(settings.seed + 0x9e3779b97f4a7c15ULL))),
          limit_(static_cast<uint64_t>(settings.probability * 9007199254740992.0)) {}  // 2^53

    bool Admit(int64_t key, uint32_t step) {
      const uint64_t of_key = MurmurHash3(static_cast<int64_t>(static_cast<uint64_t>(key) ^ salt_));
      return MurmurHash3(static_cast<int64_t>(of_key + step)) >> 11 < limit_;
    }

   private:
    uint64_t salt_;
    uint64_t limit_;
  };
  State Begin(size_t) const { return State(*this); }
};

// The admission state in checkpoints, for export and import (const): exact counters, in no
// particular order, and the shards' filters one after another.
template <class Int, class Byte>
struct BasicAdmissionColumns {
  Int* keys;
  Int* counts;
  Byte* filter;
};
using AdmissionColumns = BasicAdmissionColumns<int64_t, uint8_t>;
using ConstAdmissionColumns = BasicAdmissionColumns<const int64_t, const uint8_t>;

using Admission = std::variant<AdmitAll, AdmitByCount, AdmitByFilter, AdmitByChance>;
using AdmissionState =
    std::variant<AdmitAll::State, AdmitByCount::State, AdmitByFilter::State, AdmitByChance::State>;

inline AdmissionState BeginAdmission(const Admission& admission, size_t shards) {
  return std::visit([&](const auto& policy) -> AdmissionState { return policy.Begin(shards); },
                    admission);
}

// Returns the policy of that name with these settings, in the order of its fields. Returns nothing
// if no policy has that name or if it takes another number of settings. `seed`, from the table,
// seeds AdmitByChance.
inline std::optional<Admission> MakeAdmission(const std::string& name, const std::vector<double>& p,
                                              uint64_t seed) {
  if (name == "all" && p.empty()) return AdmitAll{};
  if (name == "count" && p.size() == 1) return AdmitByCount{static_cast<uint32_t>(p[0])};
  if (name == "filter" && p.size() == 4) {
    return AdmitByFilter{static_cast<uint32_t>(p[0]), static_cast<uint64_t>(p[1]), p[2],
                         static_cast<uint32_t>(p[3])};
  }
  if (name == "chance" && p.size() == 1) return AdmitByChance{p[0], seed};
  return std::nullopt;
}

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_CORE_ADMISSION_H_
