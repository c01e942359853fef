from ..custom.cell import Cell
from ._convert import from_keras as from_keras
from ._convert import from_ncps as from_ncps
from ._convert import from_torchrecurrent as from_torchrecurrent
from ._convert import from_xlstm as from_xlstm

class _Slstm(Cell):
    from_xlstm = staticmethod(from_xlstm)

_NAMES: list[str]

augru: Cell
cfc: Cell
cifg: Cell
cornn: Cell
dreamer_gru: Cell
indrnn: Cell
janet: Cell
keras_gru: Cell
layernorm_lstm: Cell
lem: Cell
lif: Cell
ligru: Cell
mgu: Cell
mingru: Cell
minlstm: Cell
multiplicative_lstm: Cell
mut1: Cell
mut3: Cell
peephole_lstm: Cell
rsynaptic: Cell
scrn: Cell
slstm: _Slstm
ugrnn: Cell
zoneout_lstm: Cell
