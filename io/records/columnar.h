// The columnar layout: a group of rows in one TFRecord payload, one array per column.
//
// All rows of a group have one key, (task, batch_id), so the key is stored once. An Example repeats
// in each row the names, a length for each value and a varint for each number; this layout stores
// them once per group. Reading is one pass of bounds checks over a few hundred bytes and one copy
// loop per column.
//
//     0    char[4]    "GCOL"
//     4    uint16     version, 1
//     6    uint16     flags: 1 if the rest is compressed with zstd: a uint64, its decompressed
//                     size, and one frame
//     8    uint32     columns, the key's two not counted
//     12   uint32     bytes of the schema
//     16   int64      rows, at least one
//     24   int64      task
//     32   int64      batch_id
//     40   schema     the key's columns, task first, then the others in the order of their names:
//                     varint kind (1: float32 and not int64, 2: a list), varint size, name
//     ...  uint64     a descriptor for each of the others: the number of its values << 16 |
//                     bytes per row length << 8 (0 if it isn't a list) | bytes per value
//     ...  arrays     of each of the others: a list's row lengths, then the values
//
// Numbers are little endian. The schema, and each array, is padded with zeros to a multiple of
// eight bytes, so every array is aligned in the payload; nothing follows the last one. If there are
// only the key's columns, an array of `rows` zero bytes stands in for the others.
//
//   Widths       An int64 column takes 1, 2, 4 or 8 bytes each, signed: the narrowest width that
//                holds all its values in the group; row lengths likewise, unsigned. Labels and
//                categories take a byte, times and small ids four; widening them again is a loop
//                that vectorizes. float32 is stored as it is. The encoder has no other choice:
//                equal groups make equal bytes.
//   Schema       It is written out, so that any tool can read a single record, and so that an error
//                can name the missing column. It costs bytes (a tenth at 32 rows of 20 columns) but
//                no time: records of one file have one schema. The parser compares it as a block
//                with the schema of the last record, and reads it only if the two differ.
//   Bounds       Every length is compared with the rest of the payload before it is used. A row
//                takes at least a byte, even in the stand-in, and so does a value. So whatever a
//                record claims, the parser allocates at most sixteen times its size for a column;
//                for a compressed record, sixteen times the most that its frame can hold.
//   Codec        zstd is optional when writing. It makes ids and times smaller still, and reading
//                then takes five times as long. A record that it doesn't make smaller is stored
//                plainly. Each record is compressed by itself, so reading can begin at any group of
//                a file.
//   No mix-up    'G' as a protobuf tag has the wire type 7, which doesn't exist. So no payload is
//                well-formed in both layouts, and a reader of the wrong layout reports it at once.
//
// tfrecord.h has the framing and the checksum of the payload. The encoder and the parser are in the
// files beside this one. tests/support/reference/reader.py implements the same in NumPy.

#ifndef GMETA_IO_RECORDS_COLUMNAR_H_
#define GMETA_IO_RECORDS_COLUMNAR_H_

#include <cstddef>
#include <cstdint>

#include "io/records/column.h"

namespace gmeta::records::columnar {

struct Header {
  char magic[4] = {'G', 'C', 'O', 'L'};
  uint16_t version = 1;
  uint16_t flags = 0;
  uint32_t columns = 0;
  uint32_t schema = 0;
  int64_t rows = 0;
  int64_t task = 0;
  int64_t batch = 0;
};
static_assert(sizeof(Header) == 40, "it is copied as it is");

inline constexpr uint16_t kZstd = 1;
// The largest decompressed size of a record: the limit of a plain one.
inline constexpr uint64_t kMaxBody = uint64_t{256} << 20;
// The most bytes that one byte of a zstd frame can become: a block takes at least four bytes and
// holds at most 128 KiB.
inline constexpr uint64_t kMaxRatio = (uint64_t{128} << 10) / 4;

inline constexpr size_t Padded(size_t size) { return (size + 7) & ~size_t{7}; }

inline constexpr uint64_t Kind(DType dtype, bool is_list) {
  return (dtype == DType::kFloat32 ? 1 : 0) | (is_list ? 2 : 0);
}

// The content of a column's descriptor.
struct Descriptor {
  uint64_t values = 0;
  uint8_t length_width = 0;
  uint8_t value_width = 0;

  static Descriptor Of(uint64_t word) {
    return {word >> 16, static_cast<uint8_t>(word >> 8), static_cast<uint8_t>(word)};
  }
  uint64_t word() const { return values << 16 | uint64_t{length_width} << 8 | value_width; }
};

// Calls `use` with a zero of the integer type of this width, signed or not; returns false if there
// is no such type.
template <class T1, class T2, class T4, class T8, class Use>
bool WithWidth(int width, const Use& use) {
  switch (width) {
    case 1:
      return use(T1{}), true;
    case 2:
      return use(T2{}), true;
    case 4:
      return use(T4{}), true;
    case 8:
      return use(T8{}), true;
    default:
      return false;
  }
}

template <class Use>
bool WithSigned(int width, const Use& use) {
  return WithWidth<int8_t, int16_t, int32_t, int64_t>(width, use);
}

template <class Use>
bool WithUnsigned(int width, const Use& use) {
  return WithWidth<uint8_t, uint16_t, uint32_t, uint64_t>(width, use);
}

}  // namespace gmeta::records::columnar

#endif  // GMETA_IO_RECORDS_COLUMNAR_H_
