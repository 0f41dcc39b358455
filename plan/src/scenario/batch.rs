//! Units in which batches are counted.

use crate::config::Family;
use crate::models::Inputs;

/// Unit of the batches of a model, and of its throughput.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BatchUnit {
    /// Tokens of a sequence.
    #[default]
    Tokens,
    /// Rows of a matrix.
    Rows,
    /// Images.
    Images,
    /// Models that count in different units, side by side.
    Items,
}

impl BatchUnit {
    /// Returns the plural.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tokens => "tokens",
            Self::Rows => "rows",
            Self::Images => "images",
            Self::Items => "items",
        }
    }

    /// Returns the singular, as in "time per token".
    #[must_use]
    pub const fn one(self) -> &'static str {
        match self {
            Self::Tokens => "token",
            Self::Rows => "row",
            Self::Images => "image",
            Self::Items => "item",
        }
    }

    /// Returns the unit of a rank's throughput.
    #[must_use]
    pub const fn rate(self) -> &'static str {
        match self {
            Self::Tokens => "tokens/s/GPU",
            Self::Rows => "rows/s/GPU",
            Self::Images => "images/s/GPU",
            Self::Items => "items/s/GPU",
        }
    }

    /// Returns the unit of a rank's throughput as a column title of at most ten characters.
    #[must_use]
    pub const fn column(self) -> &'static str {
        match self {
            Self::Tokens => "tok/s/GPU",
            Self::Rows => "rows/s/GPU",
            Self::Images => "img/s/GPU",
            Self::Items => "items/s",
        }
    }

    /// Returns one unit for several models; tokens if there are none.
    #[must_use]
    pub fn common(all: impl IntoIterator<Item = Self>) -> Self {
        let mut all = all.into_iter();
        let first = all.next().unwrap_or_default();
        if all.all(|unit| unit == first) {
            first
        } else {
            Self::Items
        }
    }
}

impl Family {
    /// Returns the unit of its batches.
    #[must_use]
    pub fn counted_in(self) -> BatchUnit {
        let spec = self.spec();
        match spec.inputs {
            Inputs::Images => BatchUnit::Images,
            Inputs::Features if spec.attention.is_none() => BatchUnit::Rows,
            Inputs::Features | Inputs::Tokens => BatchUnit::Tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_units_have_none_in_common() {
        use BatchUnit::{Images, Items, Tokens};
        assert_eq!(BatchUnit::common([]), Tokens);
        assert_eq!(BatchUnit::common([Images, Images]), Images);
        assert_eq!(BatchUnit::common([Images, Images, Tokens]), Items);
    }
}
