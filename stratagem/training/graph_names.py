"""Names that autograd gives to its nodes, by what they do to the rows of a batch."""

from __future__ import annotations

#: one input, one output, and the one is a multiple of the other, or some values of it
LINEAR = {
    "NegBackward0",
    "CloneBackward0",
    "ToCopyBackward0",
    "AliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsqueezeBackward0",
    "ViewBackward0",
    "ReshapeAliasBackward0",
    "UnsafeViewBackward0",
    "MulBackward1",
    "SelectBackward0",
    "ExpandBackward0",
}
SUMS = {"AddBackward0", "AddBackward1", "SubBackward0", "SubBackward1", "RsubBackward1"}
JOINS = {"StackBackward0", "CatBackward0"}
#: reductions that are neither sums nor means, along one axis or over all
_REDUCED = {
    "LogsumexpBackward0",
    "LinalgVectorNormBackward0",
    "NormBackward0",
    "NormBackward1",
    "MaxBackward0",
    "MaxBackward1",
    "MinBackward0",
    "MinBackward1",
    "StdBackward0",
    "VarBackward0",
    "ProdBackward0",
    "ProdBackward1",
    "MedianBackward0",
    "MedianBackward1",
    "AmaxBackward0",
    "AminBackward0",
}
#: functions of a mean (or a sum) over rows that are no mean (or sum) over rows
CURVED = _REDUCED | {
    "SqrtBackward0",
    "RsqrtBackward0",
    "PowBackward0",
    "PowBackward1",
    "LogBackward0",
    "Log1PBackward0",
    "Log2Backward0",
    "Log10Backward0",
    "ExpBackward0",
    "Expm1Backward0",
    "AbsBackward0",
    "ClampBackward0",
    "ClampBackward1",
    "ClampMinBackward0",
    "ClampMaxBackward0",
    "ReluBackward0",
    "ReciprocalBackward0",
    "TanhBackward0",
    "SigmoidBackward0",
    "SoftplusBackward0",
    "MaximumBackward0",
    "MinimumBackward0",
}
#: they pick rows by comparing them
RANKED = {"TopkBackward0", "SortBackward0"}
SOFTMAX = {"LogSoftmaxBackward0", "SoftmaxBackward0"}
#: products and powers
NUMBERS = {"MulBackward0", "DivBackward0", "PowBackward0", "PowBackward1"}
#: they have an axis, and take it away
WITH_DIM = _REDUCED | {"SumBackward1", "MeanBackward1"}
LOOKUPS = {
    "EmbeddingBackward0",
    "EmbeddingBagBackward0",
    "GatherBackward0",
    "IndexSelectBackward0",
    "IndexBackward0",
    "MaskedSelectBackward0",
}
#: the rows that come out are those that go in
BY_VALUE = (
    SUMS
    | NUMBERS
    | CURVED
    | LINEAR
    | SOFTMAX
    | WITH_DIM
    | {"WhereBackward0", "SliceBackward0", "UnbindBackward0"}
)
