//! Units and parameter groups.
