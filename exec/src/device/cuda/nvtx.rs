//! Ranges for profilers that show the work that the host issues, by unit and phase.
//!
//! Enabled by `SHARDLAB_NVTX`. The functions come from NVIDIA's library for programs that do not
//! use its headers. If it is missing, there are no ranges.

use super::libraries::Libraries;
use libloading::os::unix::{Library, RTLD_LAZY};
use shardlab_plan::ir::{InstrId, UnitId};
use shardlab_plan::program::{Phase, Program};
use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;

/// Names of the library in CUDA 13 and in earlier versions.
const FILES: [&str; 2] = ["libnvtx3interop.so.1", "libnvToolsExt.so.1"];

type Push = unsafe extern "C" fn(*const c_char) -> c_int;
type Pop = unsafe extern "C" fn() -> c_int;

/// The open range of a rank's host thread.
pub(super) struct Ranges {
    push: Push,
    pop: Pop,
    names: BTreeMap<(UnitId, Phase), CString>,
    open: Option<(UnitId, Phase)>,
}

impl Ranges {
    /// Creates ranges if they are requested and the library is available.
    pub(super) fn new() -> Option<Self> {
        std::env::var_os("SHARDLAB_NVTX").filter(|v| v != "0")?;
        let folders = Libraries::load(&[])
            .map(Libraries::folders)
            .unwrap_or_default();
        let paths = FILES.iter().flat_map(|f| {
            let here = folders.iter().map(move |d| d.path.join(f));
            here.chain([PathBuf::from(f)])
        });
        // SAFETY: loading the library runs no code that depends on this program; it is never
        // unloaded; the functions have these signatures in every version.
        unsafe {
            let library = paths
                .into_iter()
                .find_map(|p| Library::open(Some(p), RTLD_LAZY).ok())?;
            let push: Push = *library.get::<Push>(c"nvtxRangePushA").ok()?;
            let pop: Pop = *library.get::<Pop>(c"nvtxRangePop").ok()?;
            std::mem::forget(library);
            Some(Self {
                push,
                pop,
                names: BTreeMap::new(),
                open: None,
            })
        }
    }

    /// Records that the host issues an instruction.
    pub(super) fn at(&mut self, program: &Program, instr: InstrId) {
        let Some(i) = program.instrs.get(instr.index()) else {
            return;
        };
        let key = (i.unit, i.phase);
        if self.open == Some(key) {
            return;
        }
        self.close();
        let name = self.names.entry(key).or_insert_with(|| {
            let unit = program.units.get(i.unit.index());
            let unit = unit.map_or("", |u| u.name.as_str());
            // Names of modules contain no zero bytes.
            CString::new(format!("{unit} {}", i.phase.name())).unwrap_or_default()
        });
        // SAFETY: the name is zero-terminated and outlives the call.
        unsafe { (self.push)(name.as_ptr()) };
        self.open = Some(key);
    }

    /// Ends the open range, because the pass has been issued.
    pub(super) fn close(&mut self) {
        if self.open.take().is_some() {
            // SAFETY: a range is open on this thread.
            unsafe { (self.pop)() };
        }
    }
}
