//! The three policies, and the schedule of fully compiled steps. Each file is one lifecycle; the difference between two of
//! them can be read side by side.

pub(crate) mod fsdp2;
pub(crate) mod full;
pub(crate) mod megatron;
pub(crate) mod native;
