#include <algorithm>
#include <utility>

#include "ops/common/gpu/cuda_launch.cuh"
#include "ops/table/gpu/tiers/flights.cuh"
#include "ops/table/gpu/tiers/row_moves.cuh"
#include "ops/table/gpu/upkeep/stable_sort.cuh"
#include "ops/unique/gpu/workspace.cuh"

namespace gmeta {
namespace {

// Cuts a flight's memory. Returns where the sorted places go.
uint32_t* CutFlight(Workspace* space, FlightView* view) {
  const size_t both = size_t{2} * view->most;
  view->counts = space->Take<FlightCounts>(1);
  view->rising = space->Take<Move>(view->most);
  view->leaving = space->Take<Move>(view->most);
  view->places = space->Take<uint32_t>(both);
  view->moves = space->Take<uint32_t>(both);
  view->sorted_moves = space->Take<uint32_t>(both);
  return space->Take<uint32_t>(both);
}

uint32_t Multiprocessors() {
  int device = 0, count = 0;
  CheckCuda(cudaGetDevice(&device), "finding the current GPU");
  CheckCuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
            "asking for multiprocessors");
  return static_cast<uint32_t>(count);
}

}  // namespace

RowMoves::RowMoves(const gmeta_gpu_allocator& allocator, uint32_t lookahead, uint32_t form,
                   uint32_t form_mask)
    : allocator_(allocator),
      lookahead_(lookahead),
      form_(form),
      form_mask_(form_mask),
      multiprocessors_(Multiprocessors()),
      clock_(allocator, sizeof(Clock)) {
  // The copies are few blocks, enough to fill the bus, and mostly wait for it: they go first.
  int least = 0, greatest = 0;
  CheckCuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for priorities");
  CheckCuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
            "making a stream");
  CheckCuda(cudaEventCreateWithFlags(&listed_, cudaEventDisableTiming), "making an event");
  CheckCuda(cudaMemsetAsync(clock_.as<void>(), 0, clock_.bytes(), stream_), "clearing a clock");
  CheckCuda(cudaStreamSynchronize(stream_), "clearing a clock");
}

RowMoves::~RowMoves() {
  cudaStreamSynchronize(stream_);
  for (auto& flight : flights_) landed_.push_back(std::move(flight));
  for (auto& flight : landed_) cudaEventDestroy(flight->copied);
  cudaEventDestroy(listed_);
  cudaStreamDestroy(stream_);
}

size_t RowMoves::bytes() const {
  size_t sum = clock_.bytes();
  for (const auto& flight : flights_) sum += flight->memory.bytes();
  for (const auto& flight : landed_) sum += flight->memory.bytes();
  return sum;
}

FlightView RowMoves::View(const TablePlace& place, const Flight& flight) const {
  FlightView view{};
  view.index = place.index;
  view.rows = place.rows;
  view.pools = place.pools;
  view.form = form_;
  view.form_mask = form_mask_;
  view.number = flight.number;
  const uint32_t pins = lookahead_ + 1;
  view.pinned_from = flight.number > pins ? flight.number - pins : 1;
  view.step = flight.step;
  view.most = flight.most;
  Workspace space(flight.memory.as<void>());
  CutFlight(&space, &view);
  view.clock = clock_.as<Clock>();
  // Half a block of rows is a place: some 2 MB.
  view.log2_place_rows = place.rows.log2_block_rows - 1;
  const uint32_t last = place.rows.numbers >> view.log2_place_rows;
  while (last >> view.log2_places != 0) ++view.log2_places;
  return view;
}

std::unique_ptr<RowMoves::Flight> RowMoves::Take(uint32_t n, cudaStream_t stream) {
  std::unique_ptr<Flight> flight;
  if (landed_.empty()) {
    flight = std::make_unique<Flight>();
    CheckCuda(cudaEventCreateWithFlags(&flight->copied, cudaEventDisableTiming), "making an event");
  } else {
    flight = std::move(landed_.back());
    landed_.pop_back();
  }
  if (flight->most < n) {
    // The kernel that installed its last moves may still read them.
    CheckCuda(cudaStreamSynchronize(stream), "waiting for a table's batches");
    const uint32_t most = n + n / 4;
    flight->most = 0;
    flight->memory = DeviceMemory();
    FlightView view{};
    view.most = most;
    Workspace sizes(nullptr);
    CutFlight(&sizes, &view);
    sizes.Take<char>(StableSortBytes<uint32_t>(size_t{2} * most));
    flight->memory = DeviceMemory(allocator_, sizes.bytes());
    flight->most = most;
  }
  return flight;
}

void RowMoves::Send(const TablePlace& place, const int64_t* keys, uint32_t n, uint32_t most_free,
                    cudaStream_t stream) {
  std::unique_ptr<Flight> flight = Take(n, stream);
  flight->number = ++prefetches_;
  flight->step = place.step;
  FlightView view = View(place, *flight);
  view.flights = lookahead_ + 1;
  view.most_free = most_free;
  CheckCuda(cudaMemsetAsync(view.counts, 0, sizeof *view.counts, stream), "clearing counts");
  Launch(ListWanted, BlocksOf(n), kBlockThreads, 0, stream, "listing rows to fetch", view, keys, n);
  Launch(PickLeaving, 8 * multiprocessors_, kBlockThreads, 0, stream, "choosing rows to leave",
         view);
  Launch(AssignRows, BlocksOf(flight->most), kBlockThreads, 0, stream, "giving rows new numbers",
         view, place.counters);
  CheckCuda(cudaEventRecord(listed_, stream), "recording an event");
  CheckCuda(cudaStreamWaitEvent(stream_, listed_, 0), "waiting for lists of rows");
  const size_t both = size_t{2} * flight->most;
  Workspace space(flight->memory.as<void>());
  uint32_t* const sorted_places = CutFlight(&space, &view);
  StableSort(space.Take<char>(0), StableSortBytes<uint32_t>(both), view.places, sorted_places,
             view.moves, view.sorted_moves, both, static_cast<int>(view.log2_places) + 2, stream_);
  const bool vector = place.rows.stride % 4 == 0;
  // A block fills a multiprocessor.
  Launch(vector ? CopyFlight<uint4> : CopyFlight<uint32_t>, std::max(1u, multiprocessors_ / 16),
         kCopyThreads, 0, stream_, "copying rows between tiers", view);
  CheckCuda(cudaEventRecord(flight->copied, stream_), "recording an event");
  flights_.push_back(std::move(flight));
}

void RowMoves::Install(const TablePlace& place, size_t most, cudaStream_t stream) {
  while (!flights_.empty()) {
    const Flight& flight = *flights_.front();
    if (flights_.size() <= most && cudaEventQuery(flight.copied) != cudaSuccess) {
      cudaGetLastError();  // "not ready" is no error
      return;
    }
    CheckCuda(cudaStreamWaitEvent(stream, flight.copied, 0), "waiting for rows");
    const bool vector = place.rows.stride % 4 == 0;
    Launch(vector ? InstallMoves<uint4> : InstallMoves<uint32_t>,
           std::min(BlocksOf(size_t{2} * flight.most), 2 * multiprocessors_), kBlockThreads, 0,
           stream, "installing rows", View(place, flight), place.counters);
    landed_.push_back(std::move(flights_.front()));
    flights_.pop_front();
  }
}

}  // namespace gmeta
