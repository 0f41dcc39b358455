//! Kernels that write rows to other ranks and synchronize with them.

use super::super::context::Context;
use super::super::driver::{CudaError, RawStream};
use super::super::helper_kernels::HelperKernels;
use super::super::libraries::Libraries;
use crate::kernels::cuda::Loader;
use cudarc::driver::sys;
use std::sync::Arc;

const SOURCE: &str = include_str!("push.cu");
/// Maximum number of ranks that push to each other: the size of the largest NVLink domain.
pub(in crate::device::cuda) const MAX_RANKS: usize = 72;
/// Number of 32-bit words per signal of a rank, as in `push.cu`.
const FLAG_STRIDE: u64 = 8;
const PROBES: u64 = 2048;
/// Bytes of a rank's signals.
pub(super) const SIGNAL_BYTES: usize = 16 << 10;
/// Maximum number of blocks of a push. It equals that of NCCL's kernels: enough for NVLink's rate,
/// while most multiprocessors are left to matmuls.
const BLOCKS: u64 = 32;
const THREADS: u32 = 512;
/// Minimum number of bytes per block.
const BLOCK_BYTES: u64 = 64 << 10;

const _: () = assert!((FLAG_STRIDE as usize) * MAX_RANKS <= 1024);
const _: () = assert!((PROBES as usize + MAX_RANKS) * 4 <= SIGNAL_BYTES);

/// Returns the offset in bytes, within a rank's signals, of the word that `position` writes to test
/// whether the memory is mapped.
pub(super) const fn probe_of(position: usize) -> u64 {
    (PROBES + position as u64) * 4
}

/// The ranks that push to one another: `Team` of `push.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Team {
    /// By position: device addresses of signals.
    pub(super) signals: [u64; MAX_RANKS],
    /// Address of a word that is not 0 once the run has failed.
    pub(super) abort: u64,
    pub(super) ranks: u32,
    pub(super) me: u32,
}

/// A push: `Rows` of `push.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Rows {
    /// By position: device addresses of windows.
    pub(super) to: [u64; MAX_RANKS],
    /// Device address of the rows.
    pub(super) from: u64,
    /// Device address of the choices, `[ranks * tokens, k]` 64-bit integers.
    pub(super) choices: u64,
    /// Experts of a rank.
    pub(super) experts: u64,
    /// Rows of one rank.
    pub(super) tokens: u32,
    /// Choices of a row.
    pub(super) k: u32,
    /// Bytes of a row.
    pub(super) width: u32,
    /// Whether each rank gets separate rows, as on the way back. Otherwise all ranks get the same
    /// rows.
    pub(super) back: u32,
}

impl Rows {
    /// Returns whether rows and windows consist of whole 16-byte vectors.
    fn vectors(&self) -> bool {
        let all = self.to.iter().fold(self.from, |bits, to| bits | to);
        (all | u64::from(self.width)).is_multiple_of(16)
    }

    /// Returns the number of blocks that move the rows of all ranks.
    fn blocks(&self, ranks: u32) -> u32 {
        let bytes = u64::from(ranks) * u64::from(self.tokens) * u64::from(self.width);
        bytes.div_ceil(BLOCK_BYTES).clamp(1, BLOCKS) as u32
    }
}

/// Loaded kernels.
pub(in crate::device::cuda) struct PushKernels {
    meeting: sys::CUfunction,
    vectors: sys::CUfunction,
    bytes: sys::CUfunction,
    // Fields are dropped in this order.
    _loader: Loader,
    context: Arc<Context>,
}

// SAFETY: the handles are the driver's, and every thread may use them.
unsafe impl Send for PushKernels {}

impl PushKernels {
    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// Returns a message if a library is missing, or if a kernel cannot be compiled or loaded.
    pub(in crate::device::cuda) fn new(context: &Arc<Context>) -> Result<Self, String> {
        let libraries = Libraries::load(&[]).map_err(|e| e.to_string())?;
        let folders = libraries.folders().iter().map(|f| f.path.clone());
        let mut loader = Loader::of_user(context.target, folders.collect());
        let mut function = |name| {
            let function = loader.function(SOURCE, name, 0);
            function.map_err(|e| format!("push.cu: {e}"))
        };
        Ok(Self {
            meeting: function("meeting")?,
            vectors: function("push_vectors")?,
            bytes: function("push_bytes")?,
            _loader: loader,
            context: Arc::clone(context),
        })
    }

    /// Makes a stream wait until all ranks have reached the same point.
    pub(super) fn meet(&self, team: &Team, stream: RawStream) -> Result<(), CudaError> {
        let mut team = *team;
        HelperKernels::launch(self.meeting, 1, 128, stream, &mut [(&raw mut team).cast()])
    }

    /// Pushes rows, and waits for those of the other ranks.
    pub(super) fn push(
        &self,
        team: &Team,
        rows: &Rows,
        stream: RawStream,
    ) -> Result<(), CudaError> {
        let kernel = if rows.vectors() {
            self.vectors
        } else {
            self.bytes
        };
        let (mut team, mut rows) = (*team, *rows);
        let blocks = rows.blocks(team.ranks);
        let mut args = [(&raw mut team).cast(), (&raw mut rows).cast()];
        HelperKernels::launch(kernel, blocks, THREADS, stream, &mut args)
    }
}

impl Drop for PushKernels {
    fn drop(&mut self) {
        // The module is unloaded next, and no work is running. Errors cannot be handled here.
        let _ = self.context.bind();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(width: u32, to: u64) -> Rows {
        Rows {
            to: [to; MAX_RANKS],
            from: 0x1000,
            choices: 0x2000,
            experts: 4,
            tokens: 512,
            k: 2,
            width,
            back: 0,
        }
    }

    #[test]
    fn only_whole_vectors_move_as_vectors() {
        assert!(rows(128, 0x4000).vectors());
        assert!(!rows(88, 0x4000).vectors());
        assert!(!rows(128, 0x4008).vectors());
    }

    #[test]
    fn a_block_is_worth_its_bytes() {
        // Two ranks' 512 rows of 128 bytes are 128 KiB.
        assert_eq!(rows(128, 0).blocks(2), 2);
        assert_eq!(rows(8, 0).blocks(2), 1);
        assert_eq!(rows(8192, 0).blocks(8), 32);
    }

    /// `push.cu` declares the same structures.
    #[test]
    fn layouts_are_those_of_the_source() {
        assert!(SOURCE.contains(&format!("#define MAX_RANKS {MAX_RANKS}\n")));
        assert!(SOURCE.contains(&format!("(rank) * {FLAG_STRIDE})")));
        assert_eq!(size_of::<Team>(), MAX_RANKS * 8 + 16);
        assert_eq!(size_of::<Rows>(), MAX_RANKS * 8 + 24 + 16);
    }
}
