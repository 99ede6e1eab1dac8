// Histories at a moment, beside a plain list of all events: whatever was appended, came late, came
// twice or was compacted, every later generation gives what an earlier one gave.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/history/shard_index.h"
#include "io/history/snapshot.h"
#include "tests/native/check.h"

namespace gmeta::history {
namespace {

constexpr size_t kStripe = 5;  // events of a full stripe
constexpr size_t kColumns = 4;
constexpr int64_t kUsers = 4;

struct Event {
  int64_t time, birth, item, kind;
  int64_t value(size_t column) const {
    return column == 0 ? time : column == 1 ? birth : column == 2 ? item : kind;
  }
};
using Events = std::vector<Event>;

bool Before(const Event& a, const Event& b) {
  return std::pair(a.time, a.birth) < std::pair(b.time, b.birth);
}

// Files in memory.
class Files : public StripeSource {
 public:
  std::string* at(int64_t file) { return &files_[file]; }

  std::string_view Read(int64_t file, int64_t offset, size_t bytes) override {
    const auto begin = static_cast<size_t>(offset);
    const std::string& all = files_[file];
    if (begin > all.size()) return {};
    // A copy of just these bytes, so that a sanitizer sees what is read beside them.
    const std::string_view part = std::string_view(all).substr(begin, bytes);
    read_.assign(part.begin(), part.end());
    read_.shrink_to_fit();
    return {read_.data(), read_.size()};
  }

 private:
  std::map<int64_t, std::string> files_;
  std::vector<char> read_;
};

// A store of a shard, as simple as it can be: an append rewrites the last stripe if it isn't full.
class Store {
 public:
  void Append(int64_t user, const Events& events) {
    Events sorted = events;
    std::vector<StripePlace>& places = places_[user];
    std::vector<Events>& stripes = stripes_[user];
    if (!stripes.empty() && stripes.back().size() < kStripe) {
      sorted.insert(sorted.begin(), stripes.back().begin(), stripes.back().end());
      stripes.pop_back();
      places.pop_back();
    }
    std::stable_sort(sorted.begin(), sorted.end(), Before);
    Write(user, sorted);
  }

  void Compact(int64_t user) {
    Events all;
    for (const Events& stripe : stripes_[user]) all.insert(all.end(), stripe.begin(), stripe.end());
    std::stable_sort(all.begin(), all.end(), Before);
    stripes_[user].clear();
    places_[user].clear();
    Write(user, all);
  }

  void NextFile() { ++file_; }

  ShardIndex Index() const {
    ShardIndex index;
    for (const auto& [user, places] : places_) {
      if (!places.empty()) index.Add(user, places.data(), places.size());
    }
    return index;
  }

  Files files;

 private:
  void Write(int64_t user, const Events& events) {
    for (size_t begin = 0; begin < events.size(); begin += kStripe) {
      const Events stripe(
          events.begin() + static_cast<ptrdiff_t>(begin),
          events.begin() + static_cast<ptrdiff_t>(std::min(events.size(), begin + kStripe)));
      std::vector<std::vector<int64_t>> columns(kColumns);
      std::vector<const int64_t*> pointers;
      for (size_t c = 0; c < kColumns; ++c) {
        for (const Event& event : stripe) columns[c].push_back(event.value(c));
        pointers.push_back(columns[c].data());
      }
      std::string* file = files.at(file_);
      const auto [first, last] = std::minmax_element(columns[0].begin(), columns[0].end());
      const auto [born, late] = std::minmax_element(columns[1].begin(), columns[1].end());
      StripePlace place{0,
                        file_,
                        static_cast<int64_t>(file->size()),
                        0,
                        static_cast<int64_t>(stripe.size()),
                        *first,
                        *last,
                        *born,
                        *late};
      AppendStripe(pointers.data(), kColumns, stripe.size(), file);
      place.bytes = static_cast<int64_t>(file->size()) - place.offset;
      places_[user].push_back(place);
      stripes_[user].push_back(stripe);
    }
  }

  int64_t file_ = 0;
  std::map<int64_t, std::vector<StripePlace>> places_;
  std::map<int64_t, std::vector<Events>> stripes_;
};

using Columns = std::vector<std::vector<int64_t>>;

Columns Expected(const Events& all, const Moment& moment, size_t longest) {
  Events kept;
  for (const Event& event : all) {
    if (event.time >= moment.start && event.time < moment.until &&
        event.birth <= moment.generation) {
      kept.push_back(event);
    }
  }
  std::stable_sort(kept.begin(), kept.end(), Before);
  Columns columns(kColumns);
  for (size_t i = kept.size() - std::min(longest, kept.size()); i < kept.size(); ++i) {
    for (size_t c = 0; c < kColumns; ++c) columns[c].push_back(kept[i].value(c));
  }
  return columns;
}

Columns Rebuild(Store* store, const ShardIndex& index, int64_t user, const Moment& moment,
                size_t longest) {
  Snapshot snapshot;
  Columns found(kColumns);
  const auto [places, count] = index.Find(user);
  CHECK(snapshot.Read(places, count, 0, moment, longest, {0, 1, 2, 3}, &store->files, &found).ok());
  return found;
}

void TestEveryLaterGenerationRebuildsTheSame() {
  struct Seen {
    int64_t user;
    Moment moment;
    size_t longest;
    Columns columns;
  };
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 draw(seed);
    Store store;
    std::map<int64_t, Events> all;
    std::vector<Seen> seen;
    for (int64_t generation = 0; generation < 12; ++generation) {
      store.NextFile();
      for (int64_t user = 0; user < kUsers; ++user) {
        Events fresh;
        for (size_t n = draw() % 8; n > 0; --n) {
          const auto late = static_cast<int64_t>(draw() % 4 == 0 ? draw() % 60 : 0);
          const int64_t time = 10 * generation + static_cast<int64_t>(draw() % 10) - late;
          fresh.push_back({time, generation, static_cast<int64_t>(draw() % 9), 0});
          if (draw() % 6 == 0) fresh.push_back(fresh.back());
        }
        for (Event& event : fresh) event.kind = static_cast<int64_t>(all[user].size());
        all[user].insert(all[user].end(), fresh.begin(), fresh.end());
        if (!fresh.empty()) store.Append(user, fresh);
        if (draw() % 8 == 0) store.Compact(user);
      }
      ShardIndex index;
      CHECK(index.Decode(store.Index().Encode()) == IndexFault::kNone);
      for (const Seen& each : seen) {
        CHECK(Rebuild(&store, index, each.user, each.moment, each.longest) == each.columns);
      }
      for (int n = 0; n < 8; ++n) {
        const auto user = static_cast<int64_t>(draw() % (kUsers + 1));  // one has no events
        const auto until = static_cast<int64_t>(draw() % 130);
        const auto start = draw() % 2 == 0 ? INT64_MIN : until - static_cast<int64_t>(draw() % 50);
        const auto born = static_cast<int64_t>(draw() % static_cast<uint64_t>(generation + 1));
        const Moment moment{start, until, born};
        const size_t longest = draw() % 4 == 0 ? 1000 : draw() % 20;
        const Columns columns = Rebuild(&store, index, user, moment, longest);
        CHECK(columns == Expected(all[user], moment, longest));
        seen.push_back({user, moment, longest, columns});
      }
    }
  }
}

// Whatever was asked before, histories are the same, and what was read of a user isn't read again.
void TestRequestsOfAUserReadEachStripeOnce() {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 draw(seed);
    Store store;
    std::map<int64_t, Events> all;
    for (int64_t generation = 0; generation < 6; ++generation) {
      store.NextFile();
      for (int64_t user = 0; user < kUsers; ++user) {
        Events fresh;
        for (size_t n = draw() % 9; n > 0; --n) {
          fresh.push_back({static_cast<int64_t>(draw() % 60), generation, 0, 0});
        }
        for (Event& event : fresh) event.kind = static_cast<int64_t>(all[user].size());
        all[user].insert(all[user].end(), fresh.begin(), fresh.end());
        if (!fresh.empty()) store.Append(user, fresh);
      }
    }
    const ShardIndex index = store.Index();
    Snapshot snapshot;
    for (int64_t user = 0; user < kUsers; ++user) {
      const auto [places, count] = index.Find(user);
      snapshot.Forget();
      size_t reads = 0;  // until all was read
      for (int n = 0; n < 10; ++n) {
        const auto until = static_cast<int64_t>(draw() % 70);
        Moment moment{until - static_cast<int64_t>(draw() % 70), until,
                      static_cast<int64_t>(draw() % 6)};
        size_t longest = draw() % 4 == 0 ? 1000 : draw() % 10;
        if (n == 5) {
          moment = {};
          longest = 1000;
        }
        Columns found(kColumns);
        CHECK(snapshot.Read(places, count, 0, moment, longest, {0, 1, 2, 3}, &store.files, &found)
                  .ok());
        CHECK(found == Expected(all[user], moment, longest));
        if (n == 5) reads = snapshot.reads();
      }
      CHECK_EQ(snapshot.reads(), reads);
    }
  }
}

// Of one append per generation and nothing late, the newest events are in few stripes.
void TestOnlyNeededStripesAreRead() {
  Store store;
  Events events;
  for (int64_t i = 0; i < 200; ++i) events.push_back({i, 0, i, 0});
  store.Append(7, events);
  const ShardIndex index = store.Index();
  const auto [places, count] = index.Find(7);
  CHECK_EQ(count, size_t{40});
  CHECK_EQ(ChooseStripes(places, count, 0, {}, 1).size(), size_t{1});
  CHECK_EQ(ChooseStripes(places, count, 0, {}, 6).size(), size_t{2});
  CHECK_EQ(ChooseStripes(places, count, 0, {}, 1000).size(), size_t{40});
  CHECK_EQ(ChooseStripes(places, count, 0, {}, 0).size(), size_t{0});
  CHECK_EQ(ChooseStripes(places, count, 1, {}, 6).size(), size_t{0});
  CHECK_EQ(ChooseStripes(places, count, 0, {INT64_MIN, 103, 9}, 5).size(), size_t{2});
  CHECK_EQ(ChooseStripes(places, count, 0, {90, 100, 9}, 1000).size(), size_t{2});
  CHECK_EQ(ChooseStripes(places, count, 0, {0, 100, -1}, 1000).size(), size_t{0});
  Snapshot snapshot;
  Columns found(2);
  const Moment moment{INT64_MIN, 150, 9};
  CHECK(snapshot.Read(places, count, 0, moment, 20, {2, 0}, &store.files, &found).ok());
  CHECK_EQ(snapshot.reads(), size_t{1});
  CHECK_EQ(found[0].size(), size_t{20});
  CHECK_EQ(found[0].front(), 130);
  CHECK(found[0] == found[1]);
}

void TestDamageNamesItsStripe() {
  Store store;
  Events events;
  for (int64_t i = 0; i < 30; ++i) events.push_back({i, 0, i * i, 0});
  store.Append(3, events);
  const ShardIndex index = store.Index();
  const auto [places, count] = index.Find(3);
  std::string* file = store.files.at(0);
  const StripePlace& last = places[count - 1];
  (*file)[static_cast<size_t>(last.offset + last.bytes - 1)] ^= 1;
  Snapshot snapshot;
  Columns found(1);
  SnapshotFault fault =
      snapshot.Read(places, count, 0, {}, 12, {kColumns - 1}, &store.files, &found);
  CHECK(fault.fault == StripeFault::kColumnCrc);
  CHECK_EQ(fault.place.offset, last.offset);
  CHECK(found[0].empty());
  CHECK(snapshot.Read(places, count, 0, {}, 12, {2}, &store.files, &found).ok());
  file->resize(static_cast<size_t>(last.offset + 3));
  snapshot.Forget();
  fault = snapshot.Read(places, count, 0, {}, 12, {2}, &store.files, &found);
  CHECK(fault.fault == StripeFault::kTruncated);
  fault = snapshot.Read(places, 1, 0, {}, 12, {kColumns}, &store.files, &found);
  CHECK(fault.fault == StripeFault::kBadColumn);
}

void TestAnIndexComesBackAndDamageIsFound() {
  ShardIndex index;
  std::mt19937_64 draw(3);
  for (int64_t user = -20; user < 3000; user += 1 + static_cast<int64_t>(draw() % 3)) {
    std::vector<StripePlace> places(draw() % 50);
    int64_t offset = 0;
    for (StripePlace& place : places) {
      const auto first = static_cast<int64_t>(draw() % 1000);
      const auto size = 100 + static_cast<int64_t>(draw() % 100);
      place = {0, 4, offset, size, 256, first, first + 50, 1, 4};
      offset += size;
    }
    const bool is_deleted = places.empty() || draw() % 5 == 0;
    index.Add(user, places.data(), places.size(), is_deleted ? 1 + user % 7 * (user % 7) : 0);
  }
  CHECK(index.stripes() > kMaxEvents / 2);
  const std::string bytes = index.Encode();
  ShardIndex found;
  CHECK(found.Decode(bytes) == IndexFault::kNone);
  CHECK(found.Encode() == bytes);
  CHECK_EQ(found.users(), index.users());
  CHECK_EQ(found.Find(index.user(5)).second, index.Find(index.user(5)).second);
  CHECK_EQ(found.Find(5000).second, size_t{0});
  CHECK(!found.IsDeleted(5000, 0));
  for (size_t i = 0; i < index.users(); ++i) {
    const int64_t deletion = index.deletion(i);
    CHECK_EQ(found.IsDeleted(index.user(i), deletion - 1), deletion > 0);
    CHECK(!found.IsDeleted(index.user(i), deletion));
  }
  for (int trial = 0; trial < 300; ++trial) {
    std::string damaged = bytes;
    const size_t at = trial < 32 ? static_cast<size_t>(trial) : draw() % bytes.size();
    if (at >= 28 && at < 32) continue;  // zeros that nobody reads
    damaged[at] = static_cast<char>(damaged[at] ^ 1 << (draw() % 8));
    CHECK(found.Decode(damaged) != IndexFault::kNone);
    CHECK_EQ(found.users(), size_t{0});
  }
  for (size_t size : {size_t{0}, size_t{31}, size_t{32}, bytes.size() / 2, bytes.size() - 1}) {
    CHECK(found.Decode(bytes.substr(0, size)) != IndexFault::kNone);
  }
  CHECK(found.Decode(bytes + "x") == IndexFault::kTruncated);
  CHECK(found.Decode(ShardIndex().Encode()) == IndexFault::kNone);
}

void TestAnIndexThatCannotBeIsRefused() {
  const StripePlace good{0, 0, 0, 10, 5, 1, 2, 0, 0};
  const auto decode = [](const ShardIndex& index) { return ShardIndex().Decode(index.Encode()); };
  ShardIndex unsorted;
  unsorted.Add(2, &good, 1);
  unsorted.Add(2, &good, 1);
  CHECK(decode(unsorted) == IndexFault::kBadContent);
  for (size_t column : {size_t{2}, size_t{3}, size_t{4}, size_t{6}, size_t{8}}) {
    StripePlace bad = good;
    reinterpret_cast<int64_t*>(&bad)[column] = -1;
    ShardIndex index;
    index.Add(1, &bad, 1);
    CHECK(decode(index) == IndexFault::kBadContent);
  }
  ShardIndex without, deleted;
  without.Add(1, nullptr, 0);
  CHECK(decode(without) == IndexFault::kBadContent);
  deleted.Add(1, nullptr, 0, 3);
  CHECK(decode(deleted) == IndexFault::kNone);
}

}  // namespace
}  // namespace gmeta::history

int main() {
  gmeta::history::TestEveryLaterGenerationRebuildsTheSame();
  gmeta::history::TestRequestsOfAUserReadEachStripeOnce();
  gmeta::history::TestOnlyNeededStripesAreRead();
  gmeta::history::TestDamageNamesItsStripe();
  gmeta::history::TestAnIndexComesBackAndDamageIsFound();
  gmeta::history::TestAnIndexThatCannotBeIsRefused();
}
