"""How far two values may lie apart and still count as the same, where nothing was measured: from dtype, sums and depth.

One rounding errs by at most the unit roundoff u of its format. n of them in one sum err by about sqrt(n) u of what is
summed, not n u: rounding errors are as good as independent, of mean zero, and the bound lambda sqrt(n) u fails with
probability 2 exp(-lambda^2 / 2) for each (Higham and Mary, "A new approach to probabilistic rounding error analysis",
SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). A layer rounds its result in the format in which it is kept, and its
sum in the format in which it is accumulated (float32, also for narrower formats); D layers in a row add up as
independent errors do, like sqrt(D), as long as each amplifies what it receives by about one. (Worst-case analyses
of whole networks give the product of the layers' amplifications instead: Bernstein and others, "On the distance
between two neural networks and the stability of learning", 2020, which also gives what a relative change d of each
layer's weights does to the output: (1 + d)^D - 1. That training compares to a reference with thresholds that follow
from such perturbations, not from a constant, is the method of TTrace, arXiv 2506.09280.) Hence

    tolerance = lambda (u + u_sum sqrt(n)) sqrt(D)          for a step whose parameters are equal
              + growth                                     else: what the step received, times its depth

A backward pass has the forward behind it: 2 D. Where the forward of the same step differs, it shows how large the noise
of this model in this arithmetic is: a backward pass is then allowed eight times the median over the modules, and
what one layer may add, if that is less. What cancels (a bias in front of a normalisation has no gradient but
rounding) has no relative error worth the name: its error is held against what it was summed from.

The numbers of products that are computed in fewer bits than they are kept in (TF32, scaled float8) cannot be seen in a
dtype: they are taken from the job's switches (`float32_matmul_precision`), or as `--precision` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradtrace_analyzer.numerics.formulas import share_in_proportion, share_of_signs
from gradtrace_analyzer.numerics.model import MODEL
from gradtrace_schemas.table import NODE_SKETCH_LANES, SKETCH_LANES

# Unit roundoff: half of the distance from 1 to the next number.
ROUNDOFF = {
    "float64": 2.0**-53,
    "complex128": 2.0**-53,
    "float32": 2.0**-24,
    "complex64": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
}

# Of a float8 that is not in the table, the coarsest of those that are.
_OTHER_FLOAT8 = 2.0**-3

# No module's arithmetic is finer.
FINEST = ROUNDOFF["float64"]

# What `--precision` and the job's switches name. TF32 keeps 10 bits behind the point, as float16 does.
PRECISIONS = {
    "tf32": ROUNDOFF["float16"],
    "bf16": ROUNDOFF["bfloat16"],
    "fp16": ROUNDOFF["float16"],
    "fp8": ROUNDOFF["float8_e4m3fn"],
}

# The relative standard error of |sketch(a) - sketch(b)| as an estimate of |a - b|, by lanes: sqrt(1 / (2 lanes)).
STANDARD_ERROR = {4: 0.37, 16: 0.18}

# How many tolerances an estimate must reach before a verdict rests on it, by its sketch's lanes.
DECISIVE = {
    NODE_SKETCH_LANES: MODEL.decisive_of_nodes,
    SKETCH_LANES: MODEL.decisive_of_sketches,
}

# Lanes of a sketch are float32: the distance from 1 to the next number there.
LANE_EPSILON = 2 * ROUNDOFF["float32"]

# What a law of one run allows for a few operations in a row, in units of a dtype's last place.
LAW_ULPS = 16


def epsilon(dtype: str | None) -> float:
    """Distance from 1 to the next number of a dtype; 0 for one whose values are exact."""
    return 2 * roundoff(dtype)


def roundoff(dtype: str | None) -> float:
    """Unit roundoff of a dtype, by torch's name without `torch.`; 0 for one whose values are exact, and for None."""
    if dtype is None:
        return 0.0
    return ROUNDOFF.get(dtype, _OTHER_FLOAT8 if dtype.startswith("float8") else 0.0)


def roundoff_sql(dtype: str) -> str:
    """The same as a SQL expression over a column: what the macro `roundoff` is made of."""
    cases = " ".join(f"WHEN '{name}' THEN {unit!r}::DOUBLE" for name, unit in ROUNDOFF.items())
    return f"(CASE {dtype} {cases} ELSE CASE WHEN {dtype} LIKE 'float8%' THEN {_OTHER_FLOAT8!r}::DOUBLE ELSE 0 END END)"


@dataclass(frozen=True)
class Rule:
    """What the tolerance of a run's links follows from: the coarsest arithmetic, the longest sum, the depth.

    `unit` is the unit roundoff of that arithmetic, which `arithmetic` names for a person.
    """

    unit: float
    arithmetic: str
    summands: int
    layers: int

    def forward(self) -> float:
        """The relative error that a module's output may have where the step's parameters are equal."""
        return MODEL.confidence * self._of_a_layer() * math.sqrt(max(1, self.layers))

    def backward(self) -> float:
        """The same for a gradient, with the whole forward in front of it."""
        return MODEL.confidence * self._of_a_layer() * math.sqrt(2 * max(1, self.layers))

    def norm(self) -> float:
        """By how much a norm may change at one link beyond what it changed before it.

        Independent roundings turn a vector, they hardly lengthen it: of a relative error r the norm of n numbers
        sees r / sqrt(n) + r^2 / 2. Errors of one layer are of few independent parts where the batch is small, so
        that no more than a third is taken for granted.
        """
        r = MODEL.confidence * self._of_a_layer()
        return r / MODEL.norm_parts + r * r / 2

    def layer(self) -> float:
        """The relative error that one layer alone may add to what it receives."""
        return MODEL.confidence * self._of_a_layer()

    def _of_a_layer(self) -> float:
        accumulated = 0.0 if self.unit < 2.0**-40 else ROUNDOFF["float32"]
        sum_unit = accumulated or self.unit
        return self.unit + sum_unit * math.sqrt(max(1, self.summands))

    def words(self) -> str:
        """Where it comes from: `float32, sums of up to 512 terms, 14 layers`."""
        layers = f"{self.layers} layer{'s' * (self.layers != 1)}"
        sums = f"sums of up to {self.summands:,} terms, " if self.summands > 1 else ""
        return f"{self.arithmetic}, {sums}{layers}"


@dataclass(frozen=True)
class LowerBound:
    """The smallest tolerances that a rule can give with these sums and layers, whatever else a step shows.

    `scale` multiplies them; 0 where measured noise takes the rule's place, which may be none. `unit` is the unit
    roundoff of the finest arithmetic of any module. `is_plain`, all optimizers pass a gradient on in proportion.
    """

    scale: float = 0.0
    summands: int = 1
    layers: int = 1
    unit: float = FINEST
    is_plain: bool = True

    def layer(self, unit: float) -> float:
        """What one layer alone may add, in this arithmetic: no gradient is allowed less."""
        return self.scale * self._rule(unit).layer()

    def forward(self, unit: float) -> float:
        """The relative error that a module's output is allowed at least, whatever its step shows."""
        return self.scale * self._rule(unit).forward()

    def norm(self, unit: float) -> float:
        """By how much more than it received a link may hand on at least, as a share of the norm."""
        return self.scale * self._rule(unit).norm()

    def of_update(self, gradient_errors: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The shares of updates that these errors of gradients explain at least, of parameters of any shape."""
        share = share_in_proportion if self.is_plain else share_of_signs
        return np.asarray(np.where(gradient_errors > 0, share(gradient_errors), MODEL.updated))

    def _rule(self, unit: float) -> Rule:
        return Rule(unit, "", self.summands, self.layers)
