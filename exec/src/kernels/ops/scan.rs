//! State-space models, linear attention, convolutions with strides, norms of channels, attention
//! with a bias, a mask or an indexer, eager attention and dropout: planned and priced, not run. A
//! program with one of these operations is refused before it starts.

use super::{Call, CpuKernel};
#[cfg(feature = "cuda")]
use super::{CudaCode, CudaKernel};
use crate::kernels::error::OperandError;
use shardlab_plan::ir::op;

/// States that operations have no kernel.
macro_rules! priced_only {
    ($($Op:ident)+) => {
        $(
            impl CpuKernel for op::$Op {
                fn run(&self, _: Call<'_, '_>) -> Result<(), OperandError> {
                    Err(OperandError::Unsupported)
                }
            }

            #[cfg(feature = "cuda")]
            impl CudaKernel for op::$Op {
                fn code(&self) -> CudaCode<'_> {
                    CudaCode::Absent("this operation has no kernel")
                }
            }
        )+
    };
}

priced_only!(CausalConv1d CausalConv1dGrad SelectiveScan SelectiveScanGrad);
priced_only!(BiasedAttention BiasedAttentionGrad Indexer);
priced_only!(ChunkScan ChunkScanGrad GatedDelta GatedDeltaGrad);
priced_only!(HeadLinear HeadLinearGrad Wkv WkvGrad RgLru RgLruGrad);
priced_only!(MixStreams MixStreamsGrad MixPositions MixPositionsGrad);
priced_only!(WkvHeads WkvHeadsGrad DiagonalDelta DiagonalDeltaGrad);
priced_only!(Conv1d Conv1dGradInput Conv1dGradWeight DepthwiseConv DepthwiseConvGrad);
priced_only!(Conv2d Conv2dGradInput Conv2dGradWeight BatchNorm BatchNormGrad);
priced_only!(MaskedAttention MaskedAttentionGrad BatchedGemm Softmax SoftmaxGrad);
priced_only!(Dropout DropoutGrad);
