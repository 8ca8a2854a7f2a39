"""TensorFlow ops that do no floating-point arithmetic."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def moves_data(op_type: str) -> bool:
    """Whether ops of that type only create, move, store or draw numbers: no FLOPs."""
    return op_type in _MOVING or op_type.startswith(_MOVING_FAMILIES)


def is_plumbing(op_type: str) -> bool:
    """Whether ops of that type are left out of a model's list of layers."""
    return op_type in _PLUMBING


_MOVING = _words(
    """
    AccumulatorSetGlobalStep AccumulatorTakeGradient AsString Assert Assign AssignVariableOp BatchToSpace
    BatchToSpaceND Bitcast BroadcastTo Cast CheckNumerics CheckNumericsV2 Concat ConcatV2 ConditionalAccumulator
    ConjugateTranspose Const ControlTrigger DecodeCSV DecodeRaw DeepCopy DepthToSpace DestroyTemporaryVariable
    Diag DiagPart DynamicPartition DynamicStitch EnsureShape Enter Exit ExpandDims ExtractImagePatches Fill
    Gather GatherNd GatherV2 HostConst Identity IdentityN InplaceUpdate InvertPermutation IsVariableInitialized
    LinSpace LoopCond MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2
    MatrixDiagV3 MatrixSetDiag MatrixSetDiagV3 Merge MirrorPad MirrorPadGrad NextIteration NoOp OneHot OnesLike
    Pack Pad PadV2 ParallelDynamicStitch Placeholder PlaceholderV2 PlaceholderWithDefault PreventGradient Print
    PrintV2 RaggedGather RaggedTensorToTensor RaggedTensorToVariant Range Rank ReadVariableOp RefEnter RefExit
    RefMerge RefNextIteration RefSwitch Reshape ResizeNearestNeighbor ResourceAccumulatorTakeGradient
    ResourceConditionalAccumulator ResourceGather ResourceGatherNd ResourceReadVariableOp
    ResourceScatterNdUpdate ResourceScatterUpdate ResourceStridedSliceAssign Reverse ReverseSequence ReverseV2
    Roll ScatterNdUpdate ScatterUpdate Select SelectV2 Shape ShapeN Size Slice Snapshot SpaceToBatch
    SpaceToBatchND SpaceToDepth SparseAccumulatorTakeGradient SparseReorder SparseReshape SparseToDense Split
    SplitV Squeeze StopGradient StridedSlice StridedSliceAssign StridedSliceGrad StringFormat StringToNumber
    Switch TemporaryVariable TensorScatterMax TensorStridedSliceUpdate Tile TopK TopKV2 Transpose Unique Unpack
    VarHandleOp VarIsInitializedOp Variable VariableV2 Where ZerosLike _Arg _Retval
    """
)
# Families of ops, by prefix.
_MOVING_FAMILIES = tuple(
    _words(
        """
        Anonymous Audio Barrier Collective DecodeBmp DecodeImage DecodeJpeg DecodePng DecodeWav FIFOQueue Histogram
        ImageSummary Iterator Lookup MakeIterator Map MergeV2Checkpoints MultiDevice Multinomial Nccl
        OneShotIterator Optional ParameterizedTruncatedNormal ParseExample ParseSingleExample Queue Random
        RandomShuffleQueue Restore Save ScalarSummary Stack Stage StatefulStandardNormal StatefulTruncatedNormal
        StatefulUniform Stateless TensorArray TensorList TensorSummary TruncatedNormal Unstage WriteHistogramSummary
        WriteScalarSummary WriteSummary
        """
    )
)
_PLUMBING = _words(
    """
    Cast Const Enter Exit ExpandDims Fill Identity IteratorFromStringHandleV2 IteratorGetNext
    IteratorToStringHandle IteratorV2 LoopCond Merge NextIteration NoOp OneShotIterator Pack Placeholder
    PlaceholderV2 PlaceholderWithDefault Range ReadVariableOp Reshape Shape Squeeze StopGradient StridedSlice
    Switch VarHandleOp VariableV2
    """
)
