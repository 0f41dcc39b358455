//! Errors in units, groups and layouts.

/// Why a group cannot be laid out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Shards must hold whole rows of every parameter, so the shard grid is the least common
    /// multiple of all row sizes. If these have few common factors, the grid, and the padding to
    /// `grid * shards`, is extremely large.
    #[error(
        "too much padding: over {shards} shards, a unit with rows of {} elements needs {padded} for {payload} elements; \
         put parameters with different rows into separate units",
        list(rows)
    )]
    Padding {
        /// Distinct rows of the group, in elements.
        rows: Vec<u64>,
        /// Number of elements of the parameters.
        payload: u64,
        /// Number of shards.
        shards: u32,
        /// Number of elements with padding, or a note that it exceeds 64 bits.
        padded: String,
    },
    /// A parameter with an empty inner dimension has no rows to split at.
    #[error("a parameter has an empty row: every dimension after the first must be positive")]
    EmptyRow,
    /// More elements than a buffer can address.
    #[error("a parameter group has more than 2^59 elements")]
    TooLarge,
    /// A layout without ranks.
    #[error("a layout needs at least one shard")]
    NoShards,
}

fn list(rows: &[u64]) -> String {
    let shown: Vec<String> = rows.iter().take(8).map(u64::to_string).collect();
    let more = if rows.len() > 8 { ", ..." } else { "" };
    format!("{}{more}", shown.join(", "))
}

/// Why units or groups cannot be formed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// A pattern matches no module.
    #[error("{what} pattern `{pattern}` matches no module; {hint}")]
    NoSuchModule {
        /// Kind of the pattern.
        what: &'static str,
        /// Pattern.
        pattern: String,
        /// The module that may be meant, as a question, or a list of existing modules.
        hint: String,
    },
    /// A pattern of `train.recompute_layers` matches no block.
    #[error("recompute_layers pattern `{pattern}` matches no block; {hint}")]
    NoSuchBlock {
        /// Pattern.
        pattern: String,
        /// The blocks that may be meant.
        hint: String,
    },
    /// Two patterns select the same module for a unit.
    #[error("module `{module}` is in two units: `{first}` and `{second}`")]
    TwoUnits {
        /// Path.
        module: String,
        /// Unit that has the module.
        first: String,
        /// Unit that also selects the module.
        second: String,
    },
    /// More units than a program can name.
    #[error("{0} units are too many: a program has at most 65,535")]
    TooManyUnits(usize),
    /// A group that cannot be laid out.
    #[error("unit `{unit}`: {source}")]
    Layout {
        /// Unit name.
        unit: String,
        /// Reason.
        source: LayoutError,
    },
}
