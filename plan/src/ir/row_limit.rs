//! Rows that a rank reserves for the choices of tokens.

use serde::Serialize;

/// Rows for choices that fall on the experts of a rank, where more choices than that can fall on
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct RowLimit {
    /// Rows. Choices take them in their order, so that the last ones find none.
    pub rows: u64,
    /// Rows that choices take if experts are equally popular: what `moe.capacity_factor` is
    /// relative to.
    pub balanced: u64,
    /// Choices without a row are left out; if false, they are an error.
    pub drop: bool,
}

impl RowLimit {
    /// Returns the smallest `moe.capacity_factor`, in hundredths, that reserves a number of rows.
    #[must_use]
    pub fn factor(self, rows: u64) -> f64 {
        let balanced = u128::from(self.balanced.max(1));
        (u128::from(rows) * 100).div_ceil(balanced) as f64 / 100.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_are_rounded_up() {
        let limit = RowLimit {
            rows: 100,
            balanced: 96,
            drop: false,
        };
        // 1.25 and 1.2604.
        assert_eq!(limit.factor(120), 1.25);
        assert_eq!(limit.factor(121), 1.27);
        assert_eq!(limit.factor(96), 1.0);
    }
}
