// liblltm: recurrent layers and cells for libtorch (LLTM, LSTM, GRU, RNN and custom cells).
//
//     lltm/ops.h        lltm::step, lltm::sequence, lltm::prepack
//     lltm/nn.h         lltm::LLTM, LSTM, GRU, RNN, CustomLayer; lltm::LLTMCell, ...
//     lltm/cell.h       lltm::Cell, a custom cell
//     lltm/serialize.h  lltm::save_state_dict, lltm::load_state_dict
//     lltm/version.h    lltm::version, lltm::build_info
//     lltm/backends.h   lltm::set_cuda_persistent
#pragma once

#include <lltm/backends.h>
#include <lltm/cell.h>
#include <lltm/nn.h>
#include <lltm/ops.h>
#include <lltm/serialize.h>
#include <lltm/version.h>
