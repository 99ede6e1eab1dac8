// The rows of all tables of a step, of any widths, in one buffer: values on their way from the
// rows' owners to the ranks that requested them, and gradients on their way back.
//
// The buffer, for W ranks and T tables, where n = counts[r][t] and dim[t] is the table's width
//
//     part of rank 0 | part of rank 1 | ... | part of rank W - 1
//     part of rank r:  rows of table 0, n * dim[0] | ... | rows of table T - 1, n * dim[T - 1]
//
//   (as float16, n * (1 + dim[t]): a row begins with its scale).
//
//   Only numbers travel: both ends know the counts from the exchange of keys (key_exchange.h), and
//   rows are in its wire order. A row that several ranks requested is in the buffer once for each
//   of them.
//
// Two operations
//   PackRows     buffer[...] = rows[t][positions[t][i]], or rows[t][i] where there are no positions
//   UnpackRows   rows[t][i] = buffer[...], the inverse for rows that are in wire order
//
//   On the wire a number is a float32, a bfloat16 (half.h), or a float16 with a power of two for
//   each row (scaled_half.h): gradients are sums over samples, and may be far above or below the
//   range of float16. Both 16-bit types round to nearest and halve the traffic.
//
// Why it is fast
//   The buffer is cut into pieces of a few thousand numbers, each of one rank and one table, which
//   are processed together. A piece that needs no gathering is one run at either end and is copied
//   as such. A piece that needs gathering has its rows prefetched some places ahead. Numbers are
//   converted while they are copied, so every number is read once and written once; a row's scale
//   is found in memory that has just been fetched.

#ifndef GMETA_OPS_EXCHANGE_ROW_EXCHANGE_H_
#define GMETA_OPS_EXCHANGE_ROW_EXCHANGE_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ops/common/halves/half.h"
#include "ops/common/halves/scaled_half.h"
#include "ops/common/prefetch.h"

namespace gmeta {

// How rows travel: the type of a number on the wire, how many numbers precede a row's own, and the
// conversions of consecutive rows in both directions.
struct Float32Wire {
  using Number = float;
  static constexpr size_t kHead = 0;
  static void To(const float* from, size_t rows, size_t dim, float* to) {
    std::memcpy(to, from, rows * dim * sizeof *to);
  }
  static void From(const float* from, size_t rows, size_t dim, float* to) {
    To(from, rows, dim, to);
  }
};

struct Bfloat16Wire {
  using Number = uint16_t;
  static constexpr size_t kHead = 0;
  static void To(const float* from, size_t rows, size_t dim, uint16_t* to) {
    ToBfloats(from, rows * dim, to);
  }
  static void From(const uint16_t* from, size_t rows, size_t dim, float* to) {
    FromBfloats(from, rows * dim, to);
  }
};

struct Float16Wire {
  using Number = uint16_t;
  static constexpr size_t kHead = 1;  // the scale
  static void To(const float* from, size_t rows, size_t dim, uint16_t* to) {
    for (size_t i = 0; i < rows; ++i, from += dim, to += kHead + dim) ToScaledHalves(from, dim, to);
  }
  static void From(const uint16_t* from, size_t rows, size_t dim, float* to) {
    for (size_t i = 0; i < rows; ++i, from += kHead + dim, to += dim) {
      FromScaledHalves(from, dim, to);
    }
  }
};

// Where the rows of each rank and table are, in the buffer and in wire order.
class WireLayout {
 public:
  // Some rows of one rank and one table.
  struct Piece {
    size_t table;
    size_t row;     // the first row's place in wire order
    size_t rows;    // number of rows
    size_t offset;  // the first row's place in the buffer, in numbers
  };

  // Requires counts[rank * tables + table] >= 0. head: how many numbers precede a row's own.
  WireLayout(const int32_t* counts, size_t ranks, const std::vector<size_t>& dims, size_t head)
      : dims_(dims), rows_(dims.size(), 0), splits_(ranks, 0) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      for (size_t table = 0; table < dims.size(); ++table) {
        const size_t width = head + dims[table];
        const size_t count = static_cast<size_t>(counts[rank * dims.size() + table]);
        const size_t most = std::max<size_t>(1, kNumbersOfPiece / std::max<size_t>(1, width));
        for (size_t done = 0; done < count; done += most) {
          const size_t rows = std::min(most, count - done);
          pieces_.push_back({table, rows_[table], rows, size_});
          rows_[table] += rows;
          splits_[rank] += static_cast<int64_t>(rows * width);
          size_ += rows * width;
        }
      }
    }
  }

  size_t dim(size_t table) const { return dims_[table]; }
  const std::vector<Piece>& pieces() const { return pieces_; }

  // Number of a table's rows over all ranks; number of numbers of one rank, and of all.
  int64_t rows(size_t table) const { return static_cast<int64_t>(rows_[table]); }
  int64_t split(size_t rank) const { return splits_[rank]; }
  int64_t size() const { return static_cast<int64_t>(size_); }

  // Calls work(piece) for every piece.
  template <class ParallelFor, class Work>
  void ForPieces(const ParallelFor& parallel_for, const Work& work) const {
    parallel_for(pieces_.size(), kNumbersOfPiece / 4, [&](size_t first, size_t last) {
      for (size_t i = first; i < last; ++i) work(pieces_[i]);
    });
  }

 private:
  static constexpr size_t kNumbersOfPiece = 8192;

  std::vector<size_t> dims_;
  std::vector<size_t> rows_;
  std::vector<int64_t> splits_;
  std::vector<Piece> pieces_;
  size_t size_ = 0;
};

// The rows of one table to be packed: `size` rows, and for each row on the wire its place among
// them. Without positions, exactly the rows that travel, in wire order.
struct RowSource {
  const float* rows;
  size_t size;
  const int32_t* positions = nullptr;
};

// Returns whether all positions were valid; if not, the buffer's content is meaningless. The
// layout's head must be the wire's.
template <class Wire, class ParallelFor>
bool PackRows(const WireLayout& layout, const std::vector<RowSource>& sources,
              typename Wire::Number* buffer, const ParallelFor& parallel_for) {
  constexpr size_t kAhead = 8;
  std::atomic<bool> good{true};
  layout.ForPieces(parallel_for, [&](const WireLayout::Piece& piece) {
    const RowSource& source = sources[piece.table];
    const size_t dim = layout.dim(piece.table);
    auto* to = buffer + piece.offset;
    if (source.positions == nullptr) {
      Wire::To(source.rows + piece.row * dim, piece.rows, dim, to);
      return;
    }
    const int32_t* positions = source.positions + piece.row;
    // As an unsigned number, a negative position is too large.
    const auto in_range = [&](int32_t at) { return static_cast<uint32_t>(at) < source.size; };
    if (!std::all_of(positions, positions + piece.rows, in_range)) {
      good.store(false, std::memory_order_relaxed);
      return;
    }
    for (size_t i = 0; i < piece.rows; ++i, to += Wire::kHead + dim) {
      if (i + kAhead < piece.rows) {
        PrefetchBytes<Intent::kRead>(source.rows + positions[i + kAhead] * dim,
                                     dim * sizeof(float));
      }
      Wire::To(source.rows + positions[i] * dim, 1, dim, to);
    }
  });
  return good.load(std::memory_order_relaxed);
}

// Requires room for layout.rows(t) rows in rows[t]. The layout's head must be the wire's.
template <class Wire, class ParallelFor>
void UnpackRows(const WireLayout& layout, const typename Wire::Number* buffer,
                const std::vector<float*>& rows, const ParallelFor& parallel_for) {
  layout.ForPieces(parallel_for, [&](const WireLayout::Piece& piece) {
    const size_t dim = layout.dim(piece.table);
    Wire::From(buffer + piece.offset, piece.rows, dim, rows[piece.table] + piece.row * dim);
  });
}

}  // namespace gmeta

#endif  // GMETA_OPS_EXCHANGE_ROW_EXCHANGE_H_
