//! Element types. The facts about each are one row of [`DType::numeric`].
//!
//! `exec/src/base/element.rs` is the counterpart for devices: conversions, and the names of the
//! types in CUDA, NCCL and the libraries.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type of a tensor or buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
    /// 64-bit integer (token ids).
    I64,
    /// Raw byte.
    U8,
    /// 8 bits, 4 of exponent and 3 of mantissa, without infinities (OCP E4M3FN).
    F8E4m3,
    /// 8 bits, 5 of exponent and 2 of mantissa (OCP E5M2).
    F8E5m2,
}

/// Kind of the values of an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Floating-point numbers; kernels compute with them in float32.
    Float,
    /// Integers, which are moved but not computed with.
    Integer,
    /// 8-bit floating-point numbers, which are only used as factors of scaled GEMMs.
    Float8,
}

/// Facts about an element type that hold on every device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numeric {
    /// Name in scenario files and program text.
    pub name: &'static str,
    /// Other spellings that scenario files accept, which are those of PyTorch.
    pub aliases: &'static [&'static str],
    /// Bytes of one element.
    pub size: u64,
    /// Kind of its values.
    pub values: Values,
    /// Name in `safetensors` files.
    pub safetensors: &'static str,
    /// Names in PyTorch's traces: that of the scalar type, and that in C++.
    pub torch: &'static [&'static str],
}

impl DType {
    /// Every element type, in the order of their numbers.
    pub const ALL: [Self; 7] = [
        Self::F32,
        Self::Bf16,
        Self::F16,
        Self::I64,
        Self::U8,
        Self::F8E4m3,
        Self::F8E5m2,
    ];

    /// Returns the facts of an element type.
    #[must_use]
    pub const fn numeric(self) -> &'static Numeric {
        match self {
            Self::F32 => &Numeric {
                name: "f32",
                aliases: &["fp32", "float32", "torch.float32"],
                size: 4,
                values: Values::Float,
                safetensors: "F32",
                torch: &["Float", "float"],
            },
            Self::Bf16 => &Numeric {
                name: "bf16",
                aliases: &["bfloat16", "torch.bfloat16"],
                size: 2,
                values: Values::Float,
                safetensors: "BF16",
                torch: &["BFloat16", "c10::BFloat16"],
            },
            Self::F16 => &Numeric {
                name: "f16",
                aliases: &["fp16", "float16", "torch.float16"],
                size: 2,
                values: Values::Float,
                safetensors: "F16",
                torch: &["Half", "c10::Half"],
            },
            Self::I64 => &Numeric {
                name: "i64",
                aliases: &["int64", "torch.int64"],
                size: 8,
                values: Values::Integer,
                safetensors: "I64",
                torch: &["Long", "long"],
            },
            Self::U8 => &Numeric {
                name: "u8",
                aliases: &["uint8", "torch.uint8"],
                size: 1,
                values: Values::Integer,
                safetensors: "U8",
                torch: &["Byte", "unsigned char"],
            },
            Self::F8E4m3 => &Numeric {
                name: "f8e4m3",
                aliases: &["float8_e4m3fn", "torch.float8_e4m3fn"],
                size: 1,
                values: Values::Float8,
                safetensors: "F8_E4M3",
                torch: &["Float8_e4m3fn", "c10::Float8_e4m3fn"],
            },
            Self::F8E5m2 => &Numeric {
                name: "f8e5m2",
                aliases: &["float8_e5m2", "torch.float8_e5m2"],
                size: 1,
                values: Values::Float8,
                safetensors: "F8_E5M2",
                torch: &["Float8_e5m2", "c10::Float8_e5m2"],
            },
        }
    }

    /// Returns the size of an element in bytes.
    #[must_use]
    pub const fn size(self) -> u64 {
        self.numeric().size
    }

    /// Returns the name used in scenario files and program text.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.numeric().name
    }

    /// Returns whether the elements are floating-point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self.numeric().values, Values::Float)
    }

    /// Returns whether the elements are 8-bit floating-point numbers.
    #[must_use]
    pub const fn is_float8(self) -> bool {
        matches!(self.numeric().values, Values::Float8)
    }

    /// Returns the largest finite number of an 8-bit type; `None` for other types.
    #[must_use]
    pub const fn float8_max(self) -> Option<f32> {
        match self {
            Self::F8E4m3 => Some(448.0),
            Self::F8E5m2 => Some(57344.0),
            _ => None,
        }
    }

    /// Returns the element type that a fact, such as a name, belongs to.
    #[must_use]
    pub fn find(fits: impl Fn(&Numeric) -> bool) -> Option<Self> {
        Self::ALL.into_iter().find(|d| fits(d.numeric()))
    }

    /// Returns the floating-point type for a name in scenario files.
    #[must_use]
    pub(crate) fn float_named(name: &str) -> Option<Self> {
        Self::find(|n| n.name == name).filter(|d| d.is_float())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_type_is_listed_once_under_names_of_its_own() {
        let mut names = BTreeSet::new();
        for (number, dtype) in DType::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, number);
            let n = dtype.numeric();
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(json, format!("{:?}", n.name));
            for name in n.aliases.iter().chain(n.torch).chain([&n.name]) {
                assert!(names.insert(*name), "{name}");
            }
            assert_eq!(DType::find(|m| m.safetensors == n.safetensors), Some(dtype));
        }
        assert_eq!(DType::float_named("bf16"), Some(DType::Bf16));
        assert_eq!(DType::float_named("i64"), None);
        assert_eq!(DType::float_named("none"), None);
        assert_eq!(DType::float_named("f8e4m3"), None);
    }
}
