//! Hardware profiles: everything that `sim` knows about a machine, with a source for each number.
//!
//! A profile is a TOML file. Shipped profiles are embedded in the binary; [`load`] takes their
//! names or a path.

mod backend;
mod extend;
mod figures;
mod load;
mod overlap;
mod profile;
mod source;

pub use figures::MemoryUse;
pub use load::{load, parse, text};
pub use profile::{
    AttentionRates, AttentionRow, AttentionTable, CollectiveName, CollectiveTable, Contention,
    Counted, Device, Efficiency, Footprint, GemmMisaligned, GemmRow, GemmTable, GroupedGemmRow,
    GroupedGemmTable, Host, HostWork, MeasuredOn, MemoryClass, MemoryTable, Network, Power,
    Profile, Scale,
};
pub use source::{ProfileError, shipped};
