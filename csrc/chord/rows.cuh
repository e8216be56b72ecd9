// How the rows of a mode's order map to rows of the input and of the output.
//
// The output row is found in two steps, so that what must be read arrives during the main loop: fetch(row) before it,
// resolve(tile, row, fetched) after it; -1 is a row that must not be written. source(row) is the row of the input.
#pragma once
#include "chord/tile.cuh"

namespace chord {

struct MaskedRows {
  CHORD_DEVICE int fetch(int) const { return 0; }
  CHORD_DEVICE int resolve(const Tile&, int row, int) const { return row; }
  CHORD_DEVICE int source(int row) const { return row; }
};

struct ContiguousRows {
  const int* m_indices;
  CHORD_DEVICE int fetch(int row) const { return m_indices[row]; }
  CHORD_DEVICE int resolve(const Tile& tile, int row, int expert) const { return expert == tile.expert ? row : -1; }
  CHORD_DEVICE int source(int row) const { return row; }
};

// sorted_ids are routed indices: row id / top_k of x goes in, row id of out comes out. Others than 0..num_ids-1 are padding.
struct RoutedRows {
  const int* sorted_ids;
  int num_ids, top_k;
  CHORD_DEVICE bool valid(int id) const { return u32(id) < u32(num_ids); }
  CHORD_DEVICE int fetch(int row) const { return sorted_ids[row]; }
  CHORD_DEVICE int resolve(const Tile&, int, int id) const { return valid(id) ? id : -1; }
  CHORD_DEVICE int source(int row) const { return sorted_ids[row] / top_k; }
};

}  // namespace chord
