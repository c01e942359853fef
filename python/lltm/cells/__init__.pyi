from ..custom.cell import Cell
from ._convert import from_keras as from_keras
from ._convert import from_ncps as from_ncps
from ._convert import from_norse as from_norse
from ._convert import from_snntorch as from_snntorch
from ._convert import from_torchrecurrent as from_torchrecurrent
from ._convert import from_xlstm as from_xlstm

class _Slstm(Cell):
    from_xlstm = staticmethod(from_xlstm)

_NAMES: list[str]

alif: Cell
alpha: Cell
augru: Cell
block_gru: Cell
cfc: Cell
cifg: Cell
cornn: Cell
dreamer_gru: Cell
exprnn: Cell
gru_d: Cell
hgrn: Cell
indrnn: Cell
indylstm: Cell
janet: Cell
keras_gru: Cell
layernorm_gru: Cell
layernorm_lstm: Cell
leaky: Cell
lem: Cell
lif: Cell
ligru: Cell
lru: Cell
mgu: Cell
mingru: Cell
minlstm: Cell
multiplicative_lstm: Cell
mut1: Cell
mut3: Cell
norse_lif: Cell
peephole_lstm: Cell
plif: Cell
rg_lru: Cell
rsynaptic: Cell
scrn: Cell
slstm: _Slstm
synaptic: Cell
t_lstm: Cell
ugrnn: Cell
zoneout_lstm: Cell
