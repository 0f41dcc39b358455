//! Arguments of calls.

use crate::ffi::{RawConfig, RawStream, RawUniqueId};
use std::ffi::{CString, c_char, c_int};
use std::fmt;

/// Unique id of a communicator, equal on all of its ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// Length in bytes.
    pub const BYTES: usize = 128;

    /// Returns the bytes to send to other ranks.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    /// Creates the id from another rank's bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    pub(crate) fn from_raw(raw: RawUniqueId) -> Self {
        Self(raw.internal.map(|c| c as u8))
    }

    pub(crate) fn raw(&self) -> RawUniqueId {
        RawUniqueId {
            internal: self.0.map(|b| b as c_char),
        }
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueId({:02x?}…)", &self.0[..8])
    }
}

/// A CUDA stream (`cudaStream_t`, the same as the driver's `CUstream`); null is the default stream.
/// This crate does not own it.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub RawStream);

/// Element type.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DataType(pub c_int);

impl DataType {
    /// Signed 8 bits.
    pub const I8: Self = Self(0);
    /// Unsigned 8 bits.
    pub const U8: Self = Self(1);
    /// Signed 32 bits.
    pub const I32: Self = Self(2);
    /// Unsigned 32 bits.
    pub const U32: Self = Self(3);
    /// Signed 64 bits.
    pub const I64: Self = Self(4);
    /// Unsigned 64 bits.
    pub const U64: Self = Self(5);
    /// IEEE half precision.
    pub const F16: Self = Self(6);
    /// Single precision.
    pub const F32: Self = Self(7);
    /// Double precision.
    pub const F64: Self = Self(8);
    /// bfloat16.
    pub const BF16: Self = Self(9);
    /// 8-bit float, 4 bits of exponent.
    pub const F8E4M3: Self = Self(10);
    /// 8-bit float, 5 bits of exponent.
    pub const F8E5M2: Self = Self(11);

    /// Returns the size of an element in bytes; `None` for types that this crate does not know.
    #[must_use]
    pub const fn size(self) -> Option<usize> {
        match self.0 {
            0 | 1 | 10 | 11 => Some(1),
            6 | 9 => Some(2),
            2 | 3 | 7 => Some(4),
            4 | 5 | 8 => Some(8),
            _ => None,
        }
    }
}

/// Reduction. An integer, because NCCL creates new ones at run time (see [`crate::PreMulSum`]).
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RedOp(pub c_int);

impl RedOp {
    /// Sum.
    pub const SUM: Self = Self(0);
    /// Product.
    pub const PROD: Self = Self(1);
    /// Maximum.
    pub const MAX: Self = Self(2);
    /// Minimum.
    pub const MIN: Self = Self(3);
    /// Average over the ranks.
    pub const AVG: Self = Self(4);
}

/// A factor in the type of the data that it multiplies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// Single precision.
    F32(f32),
    /// Double precision.
    F64(f64),
    /// Bits of an IEEE half-precision number.
    F16(u16),
    /// Bits of a bfloat16.
    Bf16(u16),
    /// Signed 8 bits.
    I8(i8),
    /// Unsigned 8 bits.
    U8(u8),
    /// Signed 32 bits.
    I32(i32),
    /// Unsigned 32 bits.
    U32(u32),
    /// Signed 64 bits.
    I64(i64),
    /// Unsigned 64 bits.
    U64(u64),
}

impl Scalar {
    /// Rounds to a bfloat16: to nearest, ties to even.
    #[must_use]
    pub fn bf16(x: f32) -> Self {
        let bits = x.to_bits();
        if x.is_nan() {
            return Self::Bf16((bits >> 16) as u16 | 0x40);
        }
        let odd = (bits >> 16) & 1;
        Self::Bf16(((u64::from(bits) + 0x7fff + u64::from(odd)) >> 16) as u16)
    }

    pub(crate) const fn data_type(self) -> DataType {
        match self {
            Self::F32(_) => DataType::F32,
            Self::F64(_) => DataType::F64,
            Self::F16(_) => DataType::F16,
            Self::Bf16(_) => DataType::BF16,
            Self::I8(_) => DataType::I8,
            Self::U8(_) => DataType::U8,
            Self::I32(_) => DataType::I32,
            Self::U32(_) => DataType::U32,
            Self::I64(_) => DataType::I64,
            Self::U64(_) => DataType::U64,
        }
    }

    /// Returns the bytes of the value in native order, padded with zeros to eight bytes.
    pub(crate) fn bytes(self) -> [u8; 8] {
        let mut out = [0; 8];
        let mut put = |bytes: &[u8]| out[..bytes.len()].copy_from_slice(bytes);
        match self {
            Self::F32(x) => put(&x.to_ne_bytes()),
            Self::F64(x) => put(&x.to_ne_bytes()),
            Self::F16(x) | Self::Bf16(x) => put(&x.to_ne_bytes()),
            Self::I8(x) => put(&x.to_ne_bytes()),
            Self::U8(x) => put(&x.to_ne_bytes()),
            Self::I32(x) => put(&x.to_ne_bytes()),
            Self::U32(x) => put(&x.to_ne_bytes()),
            Self::I64(x) => put(&x.to_ne_bytes()),
            Self::U64(x) => put(&x.to_ne_bytes()),
        }
        out
    }
}

/// How many SMs of the GPU a communicator uses (`CTAPolicy`, since 2.27).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CtaPolicy {
    /// Maximum speed.
    Default,
    /// Fewer SMs if that costs little speed.
    Efficiency,
    /// No SMs if possible: copy engines move the data of all-gathers and similar collectives
    /// between registered symmetric windows (since 2.28).
    Zero,
}

/// Settings of a communicator. For settings that are `None`, NCCL uses its environment or defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// Whether calls block until their work is done. If another rank is gone, a thread may block
    /// in a call forever and cannot be released: see [`crate::Watch::abort`]. For nonblocking
    /// communicators, see [`crate::Communicator::wait_ready`].
    pub blocking: Option<bool>,
    /// Thread blocks per cluster.
    pub cga_cluster_size: Option<u32>,
    /// Minimum number of thread blocks (channels) of a collective.
    pub min_ctas: Option<u32>,
    /// Maximum number of thread blocks (channels) of a collective.
    pub max_ctas: Option<u32>,
    /// Network module, for example `Socket`.
    pub net_name: Option<CString>,
    /// Whether a split shares resources with its parent.
    pub split_share: Option<bool>,
    /// Traffic class of the network.
    pub traffic_class: Option<u32>,
    /// Name in logs.
    pub comm_name: Option<CString>,
    /// Whether in-network reductions are allowed.
    pub collnet: Option<bool>,
    /// How many SMs collectives use.
    pub cta_policy: Option<CtaPolicy>,
    /// Whether a shrunk communicator shares resources with its parent.
    pub shrink_share: Option<bool>,
    /// Thread blocks of NVLink multicast collectives.
    pub nvls_ctas: Option<u32>,
    /// Channels per peer over the network.
    pub channels_per_net_peer: Option<u32>,
    /// Whether scheduling is centered on NVLink.
    pub nvlink_centric: Option<bool>,
}

impl Config {
    /// Returns whether calls block with this configuration. NCCL's environment takes precedence.
    pub(crate) fn blocks(&self) -> bool {
        match std::env::var("NCCL_COMM_BLOCKING")
            .as_deref()
            .map(str::trim)
        {
            Ok("0") => false,
            Ok("1") => true,
            _ => self.blocking.unwrap_or(true),
        }
    }

    /// Returns NCCL's struct, which has pointers into `self`.
    pub(crate) fn raw(&self) -> RawConfig {
        let mut raw = RawConfig::initial();
        let flag = |to: &mut c_int, x: Option<bool>| {
            if let Some(x) = x {
                *to = c_int::from(x);
            }
        };
        let number = |to: &mut c_int, x: Option<u32>| {
            if let Some(x) = x {
                *to = c_int::try_from(x).unwrap_or(c_int::MAX);
            }
        };
        flag(&mut raw.blocking, self.blocking);
        number(&mut raw.cga_cluster_size, self.cga_cluster_size);
        number(&mut raw.min_ctas, self.min_ctas);
        number(&mut raw.max_ctas, self.max_ctas);
        if let Some(name) = &self.net_name {
            raw.net_name = name.as_ptr();
        }
        flag(&mut raw.split_share, self.split_share);
        number(&mut raw.traffic_class, self.traffic_class);
        if let Some(name) = &self.comm_name {
            raw.comm_name = name.as_ptr();
        }
        flag(&mut raw.collnet_enable, self.collnet);
        if let Some(policy) = self.cta_policy {
            raw.cta_policy = match policy {
                CtaPolicy::Default => 0,
                CtaPolicy::Efficiency => 1,
                CtaPolicy::Zero => 2,
            };
        }
        flag(&mut raw.shrink_share, self.shrink_share);
        number(&mut raw.nvls_ctas, self.nvls_ctas);
        number(&mut raw.channels_per_net_peer, self.channels_per_net_peer);
        flag(&mut raw.nvlink_centric_sched, self.nvlink_centric);
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::UNDEFINED;

    #[test]
    fn what_is_not_set_is_undefined() {
        let raw = Config::default().raw();
        assert_eq!((raw.magic, raw.version), (0xcafe_beef, 22809));
        for x in [raw.blocking, raw.min_ctas, raw.max_ctas, raw.cta_policy] {
            assert_eq!(x, UNDEFINED);
        }
        assert!(raw.net_name.is_null() && raw.comm_name.is_null());
        let config = Config {
            blocking: Some(false),
            max_ctas: Some(16),
            cta_policy: Some(CtaPolicy::Zero),
            comm_name: Some(c"shard".to_owned()),
            ..Config::default()
        };
        let raw = config.raw();
        assert_eq!((raw.blocking, raw.max_ctas, raw.cta_policy), (0, 16, 2));
        assert!(!raw.comm_name.is_null());
    }

    #[test]
    fn factors_are_rounded_as_bfloat16_rounds() {
        for (x, bits) in [
            (1.0f32, 0x3f80),
            (0.125, 0x3e00),
            (1.0 / 3.0, 0x3eab),
            // Halfway between two neighbors: rounds to the even one.
            (f32::from_bits(0x3f80_8000), 0x3f80),
            (f32::from_bits(0x3f81_8000), 0x3f82),
            (f32::MAX, 0x7f80),
            (f32::INFINITY, 0x7f80),
        ] {
            assert_eq!(Scalar::bf16(x), Scalar::Bf16(bits), "{x}");
        }
        let Scalar::Bf16(nan) = Scalar::bf16(f32::NAN) else {
            panic!("bfloat16")
        };
        assert_eq!(nan & 0x7f80, 0x7f80);
        assert_ne!(nan & 0x7f, 0);
    }

    #[test]
    fn factors_have_the_bytes_of_their_type() {
        for (x, dtype, bytes) in [
            (Scalar::F32(1.0), DataType::F32, &[0, 0, 0x80, 0x3f][..]),
            (
                Scalar::F64(1.0),
                DataType::F64,
                &[0, 0, 0, 0, 0, 0, 0xf0, 0x3f],
            ),
            (Scalar::F16(0x3c00), DataType::F16, &[0, 0x3c]),
            (Scalar::Bf16(0x3f80), DataType::BF16, &[0x80, 0x3f]),
            (Scalar::I8(-2), DataType::I8, &[0xfe]),
            (Scalar::U8(3), DataType::U8, &[3]),
            (Scalar::I32(-2), DataType::I32, &[0xfe, 0xff, 0xff, 0xff]),
            (Scalar::U32(258), DataType::U32, &[2, 1, 0, 0]),
            (Scalar::I64(-1), DataType::I64, &[0xff; 8]),
            (
                Scalar::U64(1 << 56),
                DataType::U64,
                &[0, 0, 0, 0, 0, 0, 0, 1],
            ),
        ] {
            // All machines that NCCL supports are little-endian.
            assert_eq!(x.bytes()[..bytes.len()], *bytes, "{x:?}");
            assert_eq!((x.data_type(), dtype.size()), (dtype, Some(bytes.len())));
        }
    }

    #[test]
    fn identities_survive_their_bytes() {
        let bytes = std::array::from_fn(|i| (i * 2) as u8);
        let id = UniqueId::from_bytes(bytes);
        assert_eq!(UniqueId::from_raw(id.raw()), id);
        assert_eq!(id.as_bytes(), &bytes);
    }
}
