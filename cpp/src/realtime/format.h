// The file of a real-time layer: a safetensors file (common/safetensors.h) with the metadata
//
//     lltm.realtime   kVersion
//     cell            a built-in cell's name or a serialized cell (cell/program_text.h)
//
// and for each layer k from 0 on, in float32 and the layout of the operators (cell/cell.h),
//
//     weight_ih_lk (Gx * H, I), weight_hh_lk (Gh * H, H), bias_ih_lk ((Gx + P) * H),
//     bias_hh_lk (Gh * H)
//
// api/realtime.cpp writes it. No PyTorch header.
#pragma once

#include "cell/cell.h"

namespace lltm::realtime {

constexpr const char *kVersionKey = "lltm.realtime", *kVersion = "1", *kCellKey = "cell";

// What the cell has that the real-time engine lacks, or null.
inline const char* unsupported(const CellInfo& cell) {
  if (cell.given > 0) return "gates in the input";
  if (cell.outputs > 0) return "other outputs than h";
  if (cell.programs == nullptr || !cell.has_stages()) return nullptr;
  return cell.operands().count > 0 ? "products" : "means";
}

}  // namespace lltm::realtime
