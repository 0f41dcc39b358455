//! Element types on devices: the Rust type of each [`DType`], its conversions, and its names in
//! CUDA, NCCL and NVIDIA's libraries.
//!
//! A new element type needs a row of `DType::numeric` in `plan`, an [`Element`] here, and a line in
//! [`match_dtype`].

use crate::base::float8::{F8E4m3, F8E5m2};
#[cfg(feature = "cuda")]
use cudarc::{cublaslt, cudnn, driver};
use half::{bf16, f16};
use shardlab_plan::ir::DType;

/// An element in memory, in the byte order of the machine.
pub(crate) trait Element: bytemuck::Pod + Send + Sync {
    /// The type on NVIDIA GPUs.
    #[cfg(feature = "cuda")]
    const CUDA: CudaElement;

    /// Returns the number as float32.
    fn widen(self) -> f32;

    /// Returns the element nearest to a number. Rounds ties to even for floats, and towards zero
    /// for integers.
    fn round(x: f32) -> Self;

    /// Returns whether the number is NaN.
    fn is_nan(self) -> bool {
        false
    }
}

/// An element type on NVIDIA GPUs. `None` marks interfaces that do not support it.
#[cfg(feature = "cuda")]
#[derive(Clone, Copy)]
pub(crate) struct CudaElement {
    /// Type in generated code.
    pub(crate) ctype: &'static str,
    /// Type of the factors of `wgmma` instructions.
    pub(crate) wgmma: Option<&'static str>,
    /// Number in `device/cuda/support.cu`.
    pub(crate) support: Option<u32>,
    /// NCCL's type.
    pub(crate) nccl: nccl_rs::DataType,
    /// Makes the factor of a premultiplied sum for NCCL.
    pub(crate) nccl_factor: Option<fn(f32) -> nccl_rs::Scalar>,
    /// Type of cuBLASLt's matrices.
    pub(crate) blas: Option<cublaslt::sys::cudaDataType>,
    /// Type of cuDNN's tensors.
    pub(crate) dnn: Option<cudnn::sys::cudnnDataType_t>,
    /// Type of tensor maps.
    pub(crate) tensor_map: Option<driver::sys::CUtensorMapDataType>,
}

#[cfg(feature = "cuda")]
impl CudaElement {
    /// Returns a type that is only moved, not computed with.
    const fn moved(ctype: &'static str, nccl: nccl_rs::DataType) -> Self {
        Self {
            ctype,
            wgmma: None,
            support: None,
            nccl,
            nccl_factor: None,
            blas: None,
            dnn: None,
            tensor_map: None,
        }
    }
}

impl Element for f32 {
    #[cfg(feature = "cuda")]
    const CUDA: CudaElement = CudaElement {
        ctype: "float",
        wgmma: None,
        support: Some(0),
        nccl: nccl_rs::DataType::F32,
        nccl_factor: Some(nccl_rs::Scalar::F32),
        blas: Some(cublaslt::sys::cudaDataType::CUDA_R_32F),
        dnn: Some(cudnn::sys::cudnnDataType_t::CUDNN_DATA_FLOAT),
        tensor_map: Some(driver::sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32),
    };

    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn round(x: f32) -> Self {
        x
    }

    fn is_nan(self) -> bool {
        self.is_nan()
    }
}

impl Element for bf16 {
    #[cfg(feature = "cuda")]
    const CUDA: CudaElement = CudaElement {
        ctype: "bf16",
        wgmma: Some("bf16"),
        support: Some(1),
        nccl: nccl_rs::DataType::BF16,
        nccl_factor: Some(nccl_rs::Scalar::bf16),
        blas: Some(cublaslt::sys::cudaDataType::CUDA_R_16BF),
        dnn: Some(cudnn::sys::cudnnDataType_t::CUDNN_DATA_BFLOAT16),
        tensor_map: Some(driver::sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16),
    };

    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    /// NaN stays NaN. There are no branches, so that loops over this function compile to vector
    /// instructions.
    #[inline(always)]
    fn round(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1))) >> 16;
        let nan = (bits >> 16) | 0x40;
        Self::from_bits((if x.is_nan() { nan } else { rounded }) as u16)
    }

    fn is_nan(self) -> bool {
        self.is_nan()
    }
}

impl Element for f16 {
    #[cfg(feature = "cuda")]
    const CUDA: CudaElement = CudaElement {
        ctype: "f16",
        wgmma: Some("f16"),
        support: Some(2),
        nccl: nccl_rs::DataType::F16,
        nccl_factor: Some(|x| nccl_rs::Scalar::F16(Self::from_f32(x).to_bits())),
        blas: Some(cublaslt::sys::cudaDataType::CUDA_R_16F),
        dnn: Some(cudnn::sys::cudnnDataType_t::CUDNN_DATA_HALF),
        tensor_map: Some(driver::sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16),
    };

    fn widen(self) -> f32 {
        self.to_f32()
    }

    fn round(x: f32) -> Self {
        Self::from_f32(x)
    }

    fn is_nan(self) -> bool {
        self.is_nan()
    }
}

impl Element for i64 {
    #[cfg(feature = "cuda")]
    const CUDA: CudaElement = CudaElement::moved("i64", nccl_rs::DataType::I64);

    fn widen(self) -> f32 {
        self as f32
    }

    fn round(x: f32) -> Self {
        x as Self
    }
}

impl Element for u8 {
    #[cfg(feature = "cuda")]
    const CUDA: CudaElement = CudaElement::moved("u8", nccl_rs::DataType::U8);

    fn widen(self) -> f32 {
        f32::from(self)
    }

    fn round(x: f32) -> Self {
        x as Self
    }
}

macro_rules! float8 {
    ($($type:ident, $ctype:literal, $blas:ident;)+) => {
        $(
            impl Element for $type {
                #[cfg(feature = "cuda")]
                const CUDA: CudaElement = CudaElement {
                    wgmma: Some($ctype),
                    blas: Some(cublaslt::sys::cudaDataType::$blas),
                    tensor_map: Some(driver::sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8),
                    ..CudaElement::moved($ctype, nccl_rs::DataType::U8)
                };

                #[inline(always)]
                fn widen(self) -> f32 {
                    self.widen()
                }

                #[inline(always)]
                fn round(x: f32) -> Self {
                    Self::round(x)
                }

                fn is_nan(self) -> bool {
                    self.widen().is_nan()
                }
            }
        )+
    };
}

float8! {
    F8E4m3, "e4m3", CUDA_R_8F_E4M3;
    F8E5m2, "e5m2", CUDA_R_8F_E5M2;
}

/// Evaluates an expression with `$T` as the Rust type of an element type.
macro_rules! match_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {{
        macro_rules! with {
            ($element:ty) => {{
                type $T = $element;
                $body
            }};
        }
        match $dtype {
            shardlab_plan::ir::DType::F32 => with!(f32),
            shardlab_plan::ir::DType::Bf16 => with!(half::bf16),
            shardlab_plan::ir::DType::F16 => with!(half::f16),
            shardlab_plan::ir::DType::I64 => with!(i64),
            shardlab_plan::ir::DType::U8 => with!(u8),
            shardlab_plan::ir::DType::F8E4m3 => with!(crate::base::float8::F8E4m3),
            shardlab_plan::ir::DType::F8E5m2 => with!(crate::base::float8::F8E5m2),
        }
    }};
}

pub(crate) use match_dtype;

/// Returns the form of an element type on NVIDIA GPUs.
#[cfg(feature = "cuda")]
pub(crate) const fn cuda(dtype: DType) -> CudaElement {
    match_dtype!(dtype, T => <T as Element>::CUDA)
}

/// Appends a number, converted to an element type.
pub(crate) fn push(out: &mut Vec<u8>, dtype: DType, x: f32) {
    match_dtype!(dtype, T => {
        out.extend_from_slice(bytemuck::bytes_of(&<T as Element>::round(x)));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_are_as_large_as_the_plan_says() {
        for dtype in DType::ALL {
            let mut out = Vec::new();
            push(&mut out, dtype, 3.0);
            assert_eq!(out.len() as u64, dtype.size());
            let (back, nan) = match_dtype!(dtype, T => {
                let back: T = bytemuck::pod_read_unaligned(&out);
                (back.widen(), Element::is_nan(<T as Element>::round(f32::NAN)))
            });
            let float = dtype.is_float() || dtype.is_float8();
            assert_eq!((back, nan), (3.0, float), "{dtype}");
        }
    }

    #[test]
    fn bfloat16_rounds_as_half_does() {
        // Every upper half with the lower halves around ties.
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (got, want) = (<bf16 as Element>::round(x), bf16::from_f32(x));
                assert!(
                    got == want || got.is_nan() && want.is_nan(),
                    "{x:?}: {got} {want}"
                );
            }
            let back = bf16::from_bits(high).widen();
            let want = bf16::from_bits(high).to_f32();
            assert!(back == want || back.is_nan() && want.is_nan());
        }
    }
}
