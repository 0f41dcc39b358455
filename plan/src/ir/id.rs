//! Indices into the tables of a model, a tape and a program.

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$m:meta])* $name:ident($t:ty)) => {
        $(#[$m])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $t);
        impl $name {
            /// Returns the index into the table that it belongs to.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    };
}
id!(
    /// Index into the tape's modules.
    ModuleId(u32)
);
id!(
    /// Index into the tape's parameters.
    ParamId(u32)
);
id!(
    /// Index into the tape's storages.
    StorageId(u32)
);
id!(
    /// Index into the tape's constants.
    ConstId(u32)
);
id!(
    /// Index into a kernel table of the tape or the program.
    KernelId(u32)
);
id!(
    /// Index into [`crate::Program::buffers`].
    BufferId(u32)
);
id!(
    /// An event. It is recorded at most once per pass over its section.
    EventId(u32)
);
id!(
    /// Index into [`crate::Program::streams`].
    StreamId(u8)
);
id!(
    /// Index into [`crate::Program::communicators`].
    CommId(u8)
);
id!(
    /// Index into the axes of a [`DeviceMesh`](super::DeviceMesh).
    AxisId(u8)
);
id!(
    /// Index into [`crate::Program::collectives`].
    CollectiveId(u32)
);
id!(
    /// Index into [`crate::Program::copies`].
    CopyId(u32)
);
id!(
    /// Index into [`crate::Program::units`].
    UnitId(u16)
);
id!(
    /// Index into [`crate::Program::groups`].
    GroupId(u16)
);
id!(
    /// Index into [`crate::Program::scopes`].
    ScopeId(u16)
);
id!(
    /// Position in [`crate::Program::instrs`]. It is stable for a scenario, and spans refer to it.
    InstrId(u32)
);

/// The stream of model kernels, which every program has.
pub const COMPUTE: StreamId = StreamId(0);
