// Both stages over ranks that exist only here, against maps; and what is refused.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "ops/exchange/key_exchange.h"
#include "ops/exchange/row_exchange.h"
#include "tests/native/check.h"
#include "tests/native/parallel.h"

namespace {

using Keys = std::vector<int64_t>;
using Places = std::vector<int32_t>;
using gmeta::KeySpan;

// What outlives the ops: one rank's results of stage 1.
struct Routed {
  Keys message;
  Places splits;
  std::vector<Keys> keys;
  std::vector<Places> inverse;
  Places counts;  // by rank, then table
};

struct Owned {
  std::vector<Keys> keys;
  std::vector<Places> positions;
  std::vector<Keys> wire_keys;
  Places counts;
  Keys notes;
};

template <class T>
std::vector<T*> Starts(std::vector<std::vector<T>>* vectors) {
  std::vector<T*> starts;
  for (std::vector<T>& vector : *vectors) starts.push_back(vector.data());
  return starts;
}

std::vector<KeySpan> Spans(const std::vector<Keys>& tables) {
  std::vector<KeySpan> spans;
  for (const Keys& keys : tables) spans.push_back({keys.data(), keys.size()});
  return spans;
}

template <class ParallelFor>
Routed Route(const std::vector<Keys>& tables, size_t ranks, const Keys& note, bool dedup,
             const ParallelFor& parallel_for) {
  const gmeta::RoutedKeys routed(Spans(tables), ranks, dedup, parallel_for);
  Routed out;
  for (size_t rank = 0; rank < ranks; ++rank) {
    out.splits.push_back(static_cast<int32_t>(routed.MessageSize(rank, note.size())));
    out.message.resize(out.message.size() + out.splits.back());
    for (size_t t = 0; t < tables.size(); ++t) out.counts.push_back(routed.count(rank, t));
  }
  for (size_t t = 0; t < tables.size(); ++t) {
    out.keys.emplace_back(routed.count(t));
    out.inverse.emplace_back(tables[t].size(), -1);
  }
  routed.Write(note.data(), note.size(), out.message.data(), Starts(&out.keys).data(),
               Starts(&out.inverse).data(), parallel_for);
  return out;
}

template <class ParallelFor>
Owned Receive(const Keys& message, const Places& splits, size_t tables, size_t note_size,
              const ParallelFor& parallel_for) {
  const gmeta::KeyMessages messages(message.data(), splits.data(), splits.size(), tables,
                                    note_size);
  CHECK(!messages.Fault(static_cast<int64_t>(message.size())).has_value());
  Owned out;
  for (size_t rank = 0; rank < splits.size(); ++rank) {
    out.notes.insert(out.notes.end(), messages.note(rank), messages.note(rank) + note_size);
    for (size_t t = 0; t < tables; ++t) out.counts.push_back(messages.count(rank, t));
  }
  for (size_t t = 0; t < tables; ++t) {
    out.wire_keys.emplace_back(messages.count(t));
    out.positions.emplace_back(messages.count(t), -1);
  }
  messages.WriteWireKeys(Starts(&out.wire_keys).data(), parallel_for);
  const gmeta::OwnedKeys owned(Spans(out.wire_keys), parallel_for);
  for (size_t t = 0; t < tables; ++t) out.keys.emplace_back(owned.count(t));
  owned.Write(
      Starts(&out.keys).data(), Starts(&out.positions).data(),
      [](size_t, size_t, const int64_t*) {}, parallel_for);
  return out;
}

// What rank `rank` gets of everyone's data.
template <class T>
std::pair<std::vector<T>, Places> Exchange(const std::vector<std::vector<T>>& data,
                                           const std::vector<Places>& splits, size_t rank) {
  std::vector<T> received;
  Places lengths;
  for (size_t sender = 0; sender < data.size(); ++sender) {
    size_t begin = 0;
    for (size_t r = 0; r < rank; ++r) begin += splits[sender][r];
    lengths.push_back(splits[sender][rank]);
    received.insert(received.end(), data[sender].begin() + begin,
                    data[sender].begin() + begin + lengths.back());
  }
  return {received, lengths};
}

void CheckRouted(const Routed& routed, const std::vector<Keys>& tables, size_t ranks, bool dedup) {
  for (size_t t = 0; t < tables.size(); ++t) {
    for (size_t i = 0; i < tables[t].size(); ++i) {
      CHECK_EQ(routed.keys[t][routed.inverse[t][i]], tables[t][i]);
    }
    const Keys& keys = routed.keys[t];
    const std::set<int64_t> distinct(tables[t].begin(), tables[t].end());
    CHECK_EQ(keys.size(), dedup ? distinct.size() : tables[t].size());
    // By owner, within an owner by part, and there by first appearance.
    const size_t parts = dedup ? gmeta::PartsOf(Spans(tables), ranks) : 1;
    size_t at = 0;
    std::set<int64_t> seen;
    for (size_t rank = 0; rank < ranks; ++rank) {
      const size_t end = at + routed.counts[rank * tables.size() + t];
      for (size_t part = 0; part < parts; ++part) {
        for (const int64_t key : tables[t]) {
          const uint64_t hash = gmeta::MurmurHash3(key);
          if (gmeta::OwnerOf(hash, ranks) != rank || gmeta::PartOf(hash, parts) != part) continue;
          if (dedup && !seen.insert(key).second) continue;
          CHECK(at < end);
          CHECK_EQ(keys[at++], key);
        }
      }
      CHECK_EQ(at, end);
    }
  }
}

float RowValue(int64_t key, size_t j) { return static_cast<float>(key % 1009) + 0.25f * j; }

// Keys there, rows back, and gradients of one there.
template <class ParallelFor>
void RoundTrip(const std::vector<std::vector<Keys>>& batches, const std::vector<size_t>& dims,
               bool dedup, const ParallelFor& parallel_for) {
  const size_t ranks = batches.size();
  const size_t tables = dims.size();
  std::vector<Routed> routed;
  std::vector<Keys> messages;
  std::vector<Places> splits;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const Keys note = {static_cast<int64_t>(rank), -1};
    routed.push_back(Route(batches[rank], ranks, note, dedup, parallel_for));
    CheckRouted(routed.back(), batches[rank], ranks, dedup);
    messages.push_back(routed.back().message);
    splits.push_back(routed.back().splits);
  }

  std::vector<Owned> owned;
  std::vector<std::vector<float>> values;
  std::vector<Places> value_splits;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto [message, lengths] = Exchange(messages, splits, rank);
    owned.push_back(Receive(message, lengths, tables, 2, parallel_for));
    const Owned& mine = owned.back();
    for (size_t sender = 0; sender < ranks; ++sender) {
      CHECK_EQ(mine.notes[2 * sender], static_cast<int64_t>(sender));
      CHECK_EQ(mine.notes[2 * sender + 1], -1);
    }
    std::vector<std::vector<float>> rows(tables);
    std::vector<gmeta::RowSource> sources;
    for (size_t t = 0; t < tables; ++t) {
      const Keys& keys = mine.keys[t];
      CHECK_EQ(std::set<int64_t>(keys.begin(), keys.end()).size(), keys.size());
      for (size_t i = 0; i < mine.wire_keys[t].size(); ++i) {
        CHECK_EQ(keys[mine.positions[t][i]], mine.wire_keys[t][i]);
      }
      for (const int64_t key : keys) {
        for (size_t j = 0; j < dims[t]; ++j) rows[t].push_back(RowValue(key, j));
      }
      sources.push_back({rows[t].data(), keys.size(), mine.positions[t].data()});
    }
    const gmeta::WireLayout layout(mine.counts.data(), ranks, dims, 0);
    values.emplace_back(layout.size());
    value_splits.emplace_back();
    for (size_t r = 0; r < ranks; ++r) {
      value_splits.back().push_back(static_cast<int32_t>(layout.split(r)));
    }
    CHECK(gmeta::PackRows<gmeta::Float32Wire>(layout, sources, values.back().data(), parallel_for));
  }

  for (size_t rank = 0; rank < ranks; ++rank) {
    const auto [buffer, lengths] = Exchange(values, value_splits, rank);
    const gmeta::WireLayout layout(routed[rank].counts.data(), ranks, dims, 0);
    CHECK_EQ(layout.size(), static_cast<int64_t>(buffer.size()));
    std::vector<std::vector<float>> rows;
    for (size_t t = 0; t < tables; ++t) rows.emplace_back(layout.rows(t) * dims[t]);
    gmeta::UnpackRows<gmeta::Float32Wire>(layout, buffer.data(), Starts(&rows), parallel_for);
    for (size_t t = 0; t < tables; ++t) {
      for (size_t i = 0; i < batches[rank][t].size(); ++i) {
        const float* row = rows[t].data() + routed[rank].inverse[t][i] * dims[t];
        for (size_t j = 0; j < dims[t]; ++j) CHECK_EQ(row[j], RowValue(batches[rank][t][i], j));
      }
    }
  }

  // All threads give what one gives.
  for (size_t rank = 0; rank < ranks; ++rank) {
    const Routed alone =
        Route(batches[rank], ranks, {static_cast<int64_t>(rank), -1}, dedup, Serial());
    CHECK(alone.message == routed[rank].message);
    CHECK(alone.keys == routed[rank].keys);
    CHECK(alone.inverse == routed[rank].inverse);
    const auto [message, lengths] = Exchange(messages, splits, rank);
    const Owned also = Receive(message, lengths, tables, 2, Serial());
    CHECK(also.keys == owned[rank].keys);
    CHECK(also.positions == owned[rank].positions);
  }
}

Keys RandomKeys(size_t n, uint64_t distinct, std::mt19937_64* random) {
  Keys keys(n);
  for (int64_t& key : keys) {
    key = distinct == 0 ? static_cast<int64_t>((*random)())
                        : static_cast<int64_t>((*random)() % distinct) - 3;
  }
  return keys;
}

// As many as fill several slices and, at the owner, several parts.
void TestRoundTrips() {
  std::mt19937_64 random(7);
  for (const size_t ranks : {1, 2, 3, 5}) {
    for (const bool dedup : {true, false}) {
      std::vector<std::vector<Keys>> batches;
      for (size_t rank = 0; rank < ranks; ++rank) {
        batches.push_back({RandomKeys(rank == 1 ? 0 : 20000, 9000, &random),
                           RandomKeys(0, 1, &random),
                           {INT64_MIN, -1, 0, INT64_MAX, 0, -1, INT64_MIN, INT64_MAX},
                           RandomKeys(9000, 0, &random),
                           RandomKeys(300, 2, &random)});
      }
      RoundTrip(batches, {3, 4, 1, 17, 64}, dedup, Serial());
      RoundTrip(batches, {3, 4, 1, 17, 64}, dedup, Threads{3});
    }
  }
  RoundTrip({{{}}, {{}}, {{}}}, {8}, true, Threads{2});
}

void TestAllKeysAtOneOwner() {
  std::mt19937_64 random(3);
  Keys keys;
  while (keys.size() < 3000) {
    const int64_t key = static_cast<int64_t>(random());
    if (gmeta::OwnerOf(gmeta::MurmurHash3(key), 4) == 2) keys.push_back(key);
  }
  RoundTrip({{keys}, {keys}, {keys}, {{}}}, {5}, true, Threads{4});
}

void TestOwnersAreRunsOfLogicalShards() {
  for (const size_t ranks : {size_t{1}, size_t{3}, size_t{1000}, size_t{1024}}) {
    size_t last = 0;
    for (uint64_t shard = 0; shard < gmeta::kLogicalShards; ++shard) {
      const size_t owner = gmeta::OwnerOf(shard << (64 - gmeta::kLog2LogicalShards), ranks);
      CHECK(owner == last || owner == last + 1);
      last = owner;
    }
    CHECK_EQ(last, ranks - 1);
  }
}

void TestFaults() {
  const auto fault = [](const Keys& message, const Places& splits) {
    return gmeta::KeyMessages(message.data(), splits.data(), splits.size(), 2, 1)
        .Fault(static_cast<int64_t>(message.size()));
  };
  CHECK(!fault({7, 1, 0, 5, 7, 0, 0}, {4, 3}).has_value());
  for (const auto& text : {
           fault({7, 1, 0, 5, 7, 0}, {4, 2}),         // shorter than its head
           fault({7, 1, 0, 5, 7, 0, 0}, {4, 4}),      // past the end
           fault({7, 1, 0, 5, 7, 0, 1}, {4, 3}),      // a key too few
           fault({7, 1, 0, 5, 7, 0, 0, 8}, {4, 4}),   // a key too many
           fault({7, 1, 0, 5, 7, 2, -1, 8}, {4, 4}),  // a count below zero
           fault({7, 1, 0, 5, 7, INT64_MAX, INT64_MAX, 8}, {4, 4}),
       }) {
    CHECK(text.has_value());
    CHECK(text->find("rank 1 of 2") != std::string::npos);
  }
  CHECK(fault({7, 0, 0}, {-1, 3})->find("rank 0 of 2") != std::string::npos);
  CHECK(fault({7, 0, 0, 7, 0, 0, 1}, {3, 3}).has_value());
}

// absolute: of numbers that are small beside the largest of them all.
template <class Wire>
void TestWire(float relative, float absolute) {
  std::mt19937_64 random(9);
  std::normal_distribution<float> normal(0, 1e9);
  const std::vector<size_t> dims = {19, 1};
  const Places counts = {700, 0, 0, 5, 3, 2000};
  const gmeta::WireLayout layout(counts.data(), 3, dims, Wire::kHead);
  CHECK_EQ(layout.rows(0), 703);
  CHECK_EQ(layout.split(1), static_cast<int64_t>(5 * (Wire::kHead + 1)));
  std::vector<std::vector<float>> rows, found;
  std::vector<gmeta::RowSource> sources;
  for (size_t t = 0; t < dims.size(); ++t) {
    rows.emplace_back(layout.rows(t) * dims[t]);
    for (float& x : rows[t]) x = normal(random);
    found.emplace_back(rows[t].size());
  }
  for (size_t t = 0; t < dims.size(); ++t) {
    sources.push_back({rows[t].data(), static_cast<size_t>(layout.rows(t))});
  }
  std::vector<typename Wire::Number> buffer(layout.size());
  CHECK(gmeta::PackRows<Wire>(layout, sources, buffer.data(), Threads{3}));
  gmeta::UnpackRows<Wire>(layout, buffer.data(), Starts(&found), Threads{2});
  for (size_t t = 0; t < dims.size(); ++t) {
    for (size_t i = 0; i < rows[t].size(); ++i) {
      const float x = rows[t][i];
      CHECK(std::abs(found[t][i] - x) <= std::max(std::abs(x) * relative, absolute));
    }
  }
}

void TestBadPositions() {
  const std::vector<float> rows(6);
  for (const int32_t bad : {2, -1, INT32_MIN, INT32_MAX}) {
    Places positions(9000, 1);
    positions[8999] = bad;
    const Places counts = {4000, 5000};
    const gmeta::WireLayout layout(counts.data(), 2, {3}, 0);
    std::vector<float> buffer(layout.size());
    CHECK(!gmeta::PackRows<gmeta::Float32Wire>(layout, {{rows.data(), 2, positions.data()}},
                                               buffer.data(), Threads{2}));
  }
}

}  // namespace

int main() {
  TestOwnersAreRunsOfLogicalShards();
  TestRoundTrips();
  TestAllKeysAtOneOwner();
  TestFaults();
  TestWire<gmeta::Float32Wire>(0, 0);
  TestWire<gmeta::Float16Wire>(1.0f / 2048, 1e10f * std::ldexp(1.0f, -40));
  TestWire<gmeta::Bfloat16Wire>(1.0f / 256, 0);
  TestBadPositions();
}
