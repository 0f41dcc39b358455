//! Single operations.
