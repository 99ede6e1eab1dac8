// The classes of a table's keys, for a step that computes one micro-batch after another. The class
// (f, l) has the keys that micro-batch f is the first to look up, and l the last. With N
// micro-batches there are N (N + 1) / 2 classes, numbered by f, then by l.
//
// Layout. A class has its distinct keys in the order of their first appearance in the batch, which
// is its micro-batches one after another. A class is open in micro-batch i if f <= i <= l: its rows
// are at hand there. Micro-batch i gets for each of its keys the place among the keys of all open
// classes, one class after another.
//
// Operations. The keys of all micro-batches are made unique together (unique.h), which numbers them
// in the order of their first appearance. So the keys that a micro-batch is the first to look up
// have consecutive numbers, and only the last use must be recorded: one pass over the
// numbers, in the order of micro-batches, overwrites a byte per key. A pass over the keys counts
// them by class, which gives each its place in its class. Then keys are copied to their classes,
// and a last pass over the numbers adds to a key's place where its class begins in the micro-batch.
//
// Why it is fast. Each key of the batch is hashed once. All that later passes read or write out of
// order are a byte and 4 bytes a distinct key, which lie in a near cache, and where the at most 36
// classes begin. Micro-batches are independent in the last pass, and may be written in parallel.

#ifndef GMETA_OPS_WINDOW_KEY_CLASSES_H_
#define GMETA_OPS_WINDOW_KEY_CLASSES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/common/partition.h"
#include "ops/common/recycled.h"
#include "ops/unique/host/parallel_unique.h"

namespace gmeta {

constexpr size_t kMostMicroBatches = 8;

constexpr size_t ClassCount(size_t micro_batches) {
  return micro_batches * (micro_batches + 1) / 2;
}

// The number of the class (first, last).
constexpr size_t ClassOf(size_t first, size_t last, size_t micro_batches) {
  return first * micro_batches - first * (first + 1) / 2 + last;
}

// Returns for each class where it begins among those that are open in a micro-batch, given the
// sizes of all classes; 0 for the others. Stores in `total` the size of the open ones.
template <class Size>
std::vector<int32_t> OpenBegins(size_t number, size_t micro_batches, const Size& size,
                                size_t* total) {
  std::vector<int32_t> begins(ClassCount(micro_batches), 0);
  *total = 0;
  for (size_t first = 0; first <= number; ++first) {
    for (size_t last = number; last < micro_batches; ++last) {
      const size_t each = ClassOf(first, last, micro_batches);
      begins[each] = static_cast<int32_t>(*total);
      *total += static_cast<size_t>(size(each));
    }
  }
  return begins;
}

class KeyClasses {
 public:
  // Requires 1 to kMostMicroBatches micro-batches, and fewer than 2^31 keys in all.
  template <class ParallelFor>
  KeyClasses(const std::vector<KeySpan>& micro_batches, const ParallelFor& parallel_for)
      : counts_(ClassCount(micro_batches.size()), 0) {
    const size_t number = micro_batches.size();
    size_t n = 0;
    for (const KeySpan& each : micro_batches) n += each.size;
    const auto ids = MakeRecycled<int64_t>(n);
    int64_t* next = ids.get();
    for (const KeySpan& each : micro_batches) next = std::copy_n(each.data, each.size, next);
    keys_ = MakeRecycled<int64_t>(n);
    numbers_ = MakeRecycled<int32_t>(n);
    found_ = FindUnique(ids.get(), n, keys_.get(), numbers_.get(), parallel_for);

    class_of_ = MakeRecycled<uint8_t>(found_);
    place_ = MakeRecycled<int32_t>(found_);
    std::vector<size_t> seen;  // the number of keys that have appeared after each micro-batch
    const int32_t* from = numbers_.get();
    size_t known = 0;
    for (size_t i = 0; i < number; ++i) {
      sizes_.push_back(micro_batches[i].size);
      for (const int32_t* end = from + sizes_[i]; from < end; ++from) {
        class_of_[*from] = static_cast<uint8_t>(i);
        known = std::max(known, static_cast<size_t>(*from) + 1);
      }
      seen.push_back(known);
    }
    size_t key = 0;
    for (size_t first = 0; first < number; ++first) {
      for (; key < seen[first]; ++key) {
        const size_t its = ClassOf(first, class_of_[key], number);
        class_of_[key] = static_cast<uint8_t>(its);
        place_[key] = counts_[its]++;
      }
    }
  }

  // The number of keys of a class.
  int32_t count(size_t each) const { return counts_[each]; }

  // Writes the keys of each class, and the places for each micro-batch.
  template <class ParallelFor>
  void Write(int64_t* const* keys, int32_t* const* places, const ParallelFor& parallel_for) const {
    for (size_t key = 0; key < found_; ++key) keys[class_of_[key]][place_[key]] = keys_[key];
    const size_t number = sizes_.size();
    std::vector<size_t> starts(1, 0);
    for (const size_t size : sizes_) starts.push_back(starts.back() + size);
    parallel_for(number, 1 + starts.back() / number, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        size_t total;
        const auto size = [this](size_t each) { return counts_[each]; };
        const std::vector<int32_t> begins = OpenBegins(i, number, size, &total);
        const int32_t* from = numbers_.get() + starts[i];
        for (size_t j = 0; j < sizes_[i]; ++j) {
          places[i][j] = begins[class_of_[from[j]]] + place_[from[j]];
        }
      }
    });
  }

 private:
  std::vector<size_t> sizes_;
  std::vector<int32_t> counts_;
  size_t found_ = 0;
  Recycled<int64_t> keys_;      // distinct, in the order of their first appearance
  Recycled<int32_t> numbers_;   // of each requested key among them
  Recycled<uint8_t> class_of_;  // of each distinct key; first its last micro-batch
  Recycled<int32_t> place_;     // of each distinct key in its class
};

struct PlaceSpan {
  const int32_t* data;
  size_t size;
};

// Writes a micro-batch's places after the keys of each class were put in another order: `within`
// has for each class the new place of each of its keys. Returns false if a place isn't that of a
// key.
inline bool MovePlaces(size_t number, size_t micro_batches, const std::vector<PlaceSpan>& within,
                       const PlaceSpan& places, int32_t* to) {
  size_t total;
  const auto size = [&within](size_t each) { return within[each].size; };
  const std::vector<int32_t> begins = OpenBegins(number, micro_batches, size, &total);
  const auto moved = MakeRecycled<int32_t>(total);
  int32_t* next = moved.get();
  for (size_t first = 0; first <= number; ++first) {
    for (size_t last = number; last < micro_batches; ++last) {
      const size_t each = ClassOf(first, last, micro_batches);
      for (size_t i = 0; i < within[each].size; ++i) *next++ = begins[each] + within[each].data[i];
    }
  }
  for (size_t i = 0; i < places.size; ++i) {
    const size_t place = static_cast<size_t>(places.data[i]);  // a negative one is too large
    if (place >= total) return false;
    to[i] = moved[place];
  }
  return true;
}

}  // namespace gmeta

#endif  // GMETA_OPS_WINDOW_KEY_CLASSES_H_
