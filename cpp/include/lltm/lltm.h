// liblltm: recurrent cells for libtorch: the Long-Long-Term-Memory cell, LSTM and GRU.
//
//     lltm/ops.h        lltm::cell, lltm::sequence
//     lltm/nn.h         lltm::LLTM, lltm::LSTM, lltm::GRU, lltm::CustomLayer; lltm::LLTMCell, ...
//     lltm/cell.h       lltm::Cell, a cell that a user has written
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
