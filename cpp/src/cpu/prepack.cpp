#include "cpu/prepack.h"

#include "cell/cells.h"
#include "common/format.h"
#include "common/tensor_views.h"
#include "cpu/gemm/gemm.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

namespace lltm::cpu {

using at::Tensor;

static_assert(dtype_tag(Storage::kF64) == static_cast<int32_t>(at::kDouble));
static_assert(dtype_tag(Storage::kF32) == static_cast<int32_t>(at::kFloat));
static_assert(dtype_tag(Storage::kF16) == static_cast<int32_t>(at::kHalf));
static_assert(dtype_tag(Storage::kBf16) == static_cast<int32_t>(at::kBFloat16));
static_assert(kInt8Tag == static_cast<int32_t>(at::kQInt8));

WeightTensors::WeightTensors(
    const CellInfo& cell,
    const Tensor& weight_ih,
    const Tensor& weight_hh,
    std::optional<at::ScalarType> packed_dtype) {
  const auto rows = [&](const Tensor& matrix) {
    return with_contiguous_rows(packed_dtype ? as_packed_dtype(matrix, *packed_dtype) : matrix);
  };
  ih = rows(weight_ih);
  views.storage = storage_of(ih.scalar_type());
  views.heads = heads_of(weight_hh);
  if (weight_hh.defined()) {
    hh = rows(rows_of_heads(weight_hh));
    views.ih = read_view(ih);
    views.hh = read_view(hh);
    views.hidden = hh.size(1) * views.heads;
    views.input_size = ih.size(1);
  } else {
    const int blocks = cell.concatenated_blocks();  // 0 if all gates are given
    views.hidden = blocks > 0 ? ih.size(0) / blocks : ih.size(1);
    views.input_size = ih.size(1) - views.hidden;
    views.ih = views.hh = read_view(ih);
    const auto bytes = static_cast<int64_t>(ih.element_size());
    views.ih.data = static_cast<char*>(views.hh.data) + views.hidden * bytes;
  }
}

void check_prepacked(const char* op, const CellInfo& cell, const Tensor& packed) {
  PackedHeader header = {};
  if (packed.dim() == 1 && packed.is_contiguous() && packed.nbytes() >= sizeof(header)) {
    header = read_header(bytes_of(packed));
  }
  TORCH_CHECK_VALUE(
      header.magic == PackedHeader::kMagic,
      op,
      ": expected weights from prepack, got bytes without a prepack header, of shape ",
      shape_text(packed.sizes()));
  if (header.cell != cell.programs->hash) {
    const auto* const other =
        std::find_if(std::begin(kCells), std::end(kCells), [&](const CellInfo* known) {
          return find_cell(known->name)->programs->hash == header.cell;
        });
    TORCH_CHECK_VALUE(
        false,
        op,
        ": expected weights prepacked for the cell ",
        cell.title(),
        ", got weights prepacked for ",
        other == std::end(kCells) ? "another cell" : (*other)->name);
  }
  TORCH_CHECK_VALUE(
      is_whole(cell, header, packed.numel()),
      op,
      ": expected weights from prepack, got bytes that do not match their header, of shape ",
      shape_text(packed.sizes()));
}

void check_prepacked(const SequenceArgs& args) {
  constexpr const char* kExpected = "lltm::sequence: expected weights from prepack";
  const CellInfo& cell = *args.cell;
  check_prepacked("lltm::sequence", cell, args.weight_ih);
  const PackedHeader header = read_header(bytes_of(args.weight_ih));
  const at::ScalarType dtype = args.input->scalar_type();
  const bool is_int8 = header.operand == kInt8Tag;
  TORCH_CHECK_TYPE(
      is_int8 ? dtype != at::kDouble : header.dtype == static_cast<int32_t>(dtype),
      kExpected,
      " of dtype ",
      dtype_text(dtype),
      ", the dtype of the input, got ",
      is_int8 ? "int8" : dtype_text(static_cast<at::ScalarType>(header.dtype)));
  const int64_t hidden = args.h_0->size(1);
  const int64_t input_size = args.input->size(-1) - cell.given * hidden;
  TORCH_CHECK_VALUE(
      header.hidden == hidden && header.input_size == input_size,
      kExpected,
      " of shape (",
      cell.concatenated_blocks() * hidden,
      ", ",
      hidden + input_size,
      "), got weights for hidden size ",
      header.hidden,
      " and input size ",
      header.input_size);
}

Tensor aligned(const Tensor& packed) {
  const auto address = reinterpret_cast<std::uintptr_t>(packed.const_data_ptr());
  return address % kPackedAlignment == 0 ? packed : packed.clone();
}

namespace {

void check_quantizable(
    const CellInfo& cell, at::ScalarType dtype, int64_t state_size, int64_t input_size) {
  TORCH_CHECK_TYPE(
      dtype != at::kDouble,
      "lltm::prepack: expected weights of dtype float32, bfloat16 or float16 to quantize, got"
      " float64");
  TORCH_CHECK_VALUE(
      !cell.has_stages(),
      "lltm::prepack: expected a cell without products and means to quantize, got ",
      cell.title());
  TORCH_CHECK_VALUE(
      cell.bounded,
      "lltm::prepack: expected a cell that is bounded (|h'| <= 1) to quantize, got ",
      cell.title());
  TORCH_CHECK_VALUE(
      state_size <= kInt8MostK && input_size <= kInt8MostK,
      "lltm::prepack: expected weights of hidden and input size at most ",
      kInt8MostK,
      " to quantize, got ",
      state_size,
      " and ",
      input_size);
}

}  // namespace

Tensor prepack(
    const CellInfo& cell,
    const Tensor& weight_ih,
    const Tensor& weight_hh,
    std::optional<at::ScalarType> quantized) {
  const at::ScalarType dtype = weight_ih.scalar_type();
  const Weights given = weights_of(cell, weight_ih, weight_hh);
  const bool empty = (cell.x.count() > 0 ? given.ih : given.hh).numel() == 0;
  const bool in_aten = dtype == at::kDouble || empty || !F32Format::available();
  const bool quantizes = quantized == at::kQInt8 && !empty;
  const bool packs = packs_heads(given.hh) && (quantizes || !in_aten);
  const Tensor hh = packs ? weight_hh : without_heads(weight_hh);
  if (in_aten && !quantizes) {
    return weight_hh.defined() ? concatenate(cell, {weight_ih, hh})
                               : weight_ih.clone(at::MemoryFormat::Contiguous);
  }
  if (quantizes) check_quantizable(cell, dtype, given.hh.size(-1), given.ih.size(1));
  const bool bf16 = dtype == at::kBFloat16;
  const GemmFormat format = quantizes                     ? GemmFormat::kInt8
                            : bf16 && kernels().fast_bf16 ? GemmFormat::kBf16
                                                          : GemmFormat::kF32;
  const WeightTensors weights(
      cell, weight_ih, hh, format == GemmFormat::kBf16 ? at::kBFloat16 : at::kFloat);
  const Storage storage = quantizes ? Storage::kF32 : storage_of(dtype);
  const auto pack = [&](bool twice) {
    const PackedHeader header = make_header(cell, weights.views, format, storage, twice);
    const auto options = weight_ih.options().dtype(at::kByte);
    const Tensor packed = empty_large({packed_size(cell, header)}, options);
    auto* const to = static_cast<std::byte*>(packed.mutable_data_ptr());
    return write_packed(cell, header, weights.views, to) ? packed : Tensor();
  };
  const bool many = format == GemmFormat::kF32 && Bf16x3Format::available();
  Tensor packed = many && !bf16 && !cell.has_stages() ? pack(/*twice=*/true) : Tensor();
  if (!packed.defined()) packed = pack(/*twice=*/false);
  TORCH_CHECK_VALUE(
      packed.defined(), "lltm::prepack: expected finite weights to quantize, got inf or nan");
  return packed;
}

Weights unpack(const CellInfo& cell, const Tensor& packed) {
  const PackedHeader header = read_header(bytes_of(packed));
  const bool bf16 = has_form(bytes_of(packed), GemmFormat::kBf16);
  const auto options = packed.options().dtype(bf16 ? at::kBFloat16 : at::kFloat);
  const auto dtype = static_cast<at::ScalarType>(header.dtype);
  const int64_t rows = cell.h.count() * header.hidden, heads = header.heads();
  const Tensor ih = at::empty({cell.x.count() * header.hidden, header.input_size}, options);
  const Tensor hh = at::empty({rows, header.hidden / heads}, options);
  unpack(cell, bytes_of(packed), view(ih), view(hh));
  const Tensor given = heads > 1 ? hh.unflatten(0, {heads, rows / heads}) : hh;
  return {ih.to(dtype), given.to(dtype)};
}

}  // namespace lltm::cpu
