// UndoLog: the records that restore a shard to each of its open snapshots. Taking a snapshot copies
// nothing; from then on, a record is copied when it first changes.
//
// Layers
//   An open snapshot is a layer: key -> the record that the key had when the snapshot was taken, or
//   a note that it had none. Changes are noted in the newest layer alone, so each layer holds what
//   changed between its snapshot and the next. To restore a snapshot, a shard puts back the first
//   note of each key, starting from that snapshot's layer. Restoring is a change like any other: it
//   is noted in the newest layer, and later snapshots stay valid.
//
// Cost
//   Without an open snapshot, one comparison per record. With any, a probe of the newest layer for
//   each record that is used, and a copy (in float32) of each record that has changed since.
//
// Not thread-safe: Shard has the lock.

#ifndef GMETA_OPS_TABLE_HOST_UNDO_LOG_H_
#define GMETA_OPS_TABLE_HOST_UNDO_LOG_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "ops/common/murmur_hash3.h"
#include "ops/table/core/index/key_index.h"
#include "ops/table/core/row_record.h"

namespace gmeta {

class UndoLog {
 public:
  // The record of a key at some moment. `values` holds its weights and slots; it is null if the key
  // had no record.
  struct Record {
    int64_t key;
    RowHeader header;
    const float* values;
  };

  explicit UndoLog(const RowLayout& layout) : dim_(layout.dim()), slots_(layout.slot_floats()) {}

  bool is_open() const { return !layers_.empty(); }

  void Begin() { layers_.emplace_back(); }

  // Forgets snapshot number `at`, counted from the oldest. Its notes move to the previous snapshot.
  void Drop(size_t at) {
    if (at > 0) {
      const Layer& from = layers_[at];
      for (size_t i = 0; i < from.keys.size(); ++i) {
        const Record record = Read(from, i);
        float* to = Add(&layers_[at - 1], record.key, MurmurHash3(record.key), record.header,
                        record.values != nullptr);
        if (to != nullptr) std::copy_n(record.values, width(), to);
      }
    }
    layers_.erase(layers_.begin() + static_cast<ptrdiff_t>(at));
  }

  // Notes the record of a key; call this before the key changes. `row` is its row, or kNoRow.
  template <class RowsOfShard>
  void Note(const RowsOfShard& rows, int64_t key, uint64_t hash, uint32_t row) {
    if (!is_open()) return;
    const bool there = row != kNoRow;
    const RowHeader header = there ? *rows.header(row) : RowHeader{0, 0};
    float* to = Add(&layers_.back(), key, hash, header, there);
    if (to == nullptr) return;
    rows.CopyWeights(row, to);
    rows.CopySlots(row, to + dim_);
  }

  // Calls put_back(Record) for each key that has changed since snapshot number `at`. put_back may
  // call Note.
  template <class PutBack>
  void Undo(size_t at, const PutBack& put_back) {
    KeyIndex done;
    for (size_t layer = at; layer < layers_.size(); ++layer) {
      const size_t noted = layers_[layer].keys.size();
      for (size_t i = 0; i < noted; ++i) {
        const Record record = Read(layers_[layer], i);
        const uint64_t hash = MurmurHash3(record.key);
        if (done.Find(record.key, hash) != kNoRow) continue;
        done.Insert(record.key, hash, 0);
        put_back(record);
      }
    }
    if (at + 1 == layers_.size()) layers_.back() = Layer();  // the shard equals the snapshot now
  }

  size_t bytes() const {
    size_t sum = 0;
    for (const Layer& layer : layers_) {
      sum += layer.places.bytes() + layer.pages.size() * kPage * width() * sizeof(float) +
             layer.keys.capacity() * (sizeof(int64_t) + sizeof(RowHeader) + sizeof(uint32_t));
    }
    return sum;
  }

 private:
  static constexpr size_t kPage = 16;  // records; a table has 64 shards, each with its own pages
  static constexpr uint32_t kAbsent = UINT32_MAX;

  struct Layer {
    KeyIndex places;  // key -> its place in the vectors
    std::vector<int64_t> keys;
    std::vector<RowHeader> headers;
    std::vector<uint32_t> records;  // number of the record on the pages, or kAbsent
    std::vector<std::unique_ptr<float[]>> pages;
    uint32_t size = 0;  // records on the pages
  };

  size_t width() const { return dim_ + slots_; }

  float* Values(const Layer& layer, uint32_t record) const {
    return layer.pages[record / kPage].get() + record % kPage * width();
  }

  Record Read(const Layer& layer, size_t place) const {
    const uint32_t record = layer.records[place];
    return {layer.keys[place], layer.headers[place],
            record == kAbsent ? nullptr : Values(layer, record)};
  }

  // Adds a note to a layer unless it has the key. Returns where to copy the values of the record,
  // or null if there is nothing to copy.
  float* Add(Layer* layer, int64_t key, uint64_t hash, RowHeader header, bool there) {
    if (layer->places.Find(key, hash) != kNoRow) return nullptr;
    layer->places.Insert(key, hash, static_cast<uint32_t>(layer->keys.size()));
    layer->keys.push_back(key);
    layer->headers.push_back(header);
    layer->records.push_back(there ? layer->size : kAbsent);
    if (!there) return nullptr;
    if (layer->size % kPage == 0) {
      layer->pages.emplace_back(new float[kPage * width()]);  // Note fills it
    }
    return Values(*layer, layer->size++);
  }

  const size_t dim_, slots_;
  std::vector<Layer> layers_;  // the oldest snapshot first
};

}  // namespace gmeta

#endif  // GMETA_OPS_TABLE_HOST_UNDO_LOG_H_
