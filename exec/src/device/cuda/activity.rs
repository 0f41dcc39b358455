//! CUPTI's activity records: when each kernel and copy of a pass ran, according to the GPU's own
//! clock. Nothing is inserted into the streams.
//!
//! Records are assigned to tasks by correlation ids. The commands of a task are issued within an
//! external region that has the task's label. CUPTI relates the label to the calls in the region,
//! and the calls to the work that ran.

use crate::base::abort::lock;
use cudarc::cupti::result::{self as cupti, CuptiError, activity};
use cudarc::cupti::sys::{
    self, CUpti_ActivityExternalCorrelation, CUpti_ActivityKernel9, CUpti_ActivityKind as Kind,
    CUpti_ActivityMemcpy6, CUpti_ActivityMemcpyPtoP4, CUpti_ActivityMemset4,
    CUpti_ExternalCorrelationKind as External,
};
use cudarc::driver::sys::CUcontext;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock};

/// Bytes of a buffer of records.
const BUFFER: usize = 4 << 20;
const LAYOUT: Layout = match Layout::from_size_align(BUFFER, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("a power of two is an alignment"),
};

/// Kinds of records: work, and the calls that relate it to labels.
const KINDS: [Kind; 7] = [
    Kind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
    Kind::CUPTI_ACTIVITY_KIND_MEMCPY,
    // Copies between GPUs: collectives on copy engines.
    Kind::CUPTI_ACTIVITY_KIND_MEMCPY2,
    Kind::CUPTI_ACTIVITY_KIND_MEMSET,
    Kind::CUPTI_ACTIVITY_KIND_DRIVER,
    Kind::CUPTI_ACTIVITY_KIND_RUNTIME,
    Kind::CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION,
];

/// Contents of the buffers. CUPTI serves the whole process, so this does as well.
static COLLECTED: Mutex<Collected> = Mutex::new(Collected {
    labels: Vec::new(),
    work: Vec::new(),
});

#[derive(Debug)]
struct Collected {
    /// Correlation and label.
    labels: Vec<(u32, u64)>,
    /// Correlation, start and end.
    work: Vec<(u32, u64, u64)>,
}

/// Activity records of this process. Only one instance exists at a time.
#[derive(Debug)]
pub(super) struct Activity {
    /// Host clock minus CUPTI's, nanoseconds.
    offset: i128,
}

fn words(e: CuptiError) -> String {
    format!("CUPTI: {e:?}")
}

impl Activity {
    /// Starts recording. `now` returns the host's clock.
    pub(super) fn start(now: impl Fn() -> u64) -> Result<Self, String> {
        static REGISTERED: OnceLock<Result<(), String>> = OnceLock::new();
        REGISTERED
            .get_or_init(|| {
                activity::register_callbacks(Some(request), Some(complete)).map_err(words)
            })
            .clone()?;
        let mut collected = lock(&COLLECTED);
        collected.labels.clear();
        collected.work.clear();
        drop(collected);
        for kind in KINDS {
            match activity::enable(kind) {
                // Without these records, collectives on copy engines have the spans of their
                // kernels.
                Err(_) if kind == Kind::CUPTI_ACTIVITY_KIND_MEMCPY2 => {}
                other => other.map_err(words)?,
            }
        }
        let mut theirs = 0;
        // SAFETY: the output is a local number.
        unsafe { cupti::get_timestamp(&raw mut theirs) }.map_err(words)?;
        Ok(Self {
            offset: i128::from(now()) - i128::from(theirs),
        })
    }

    /// Starts the region of a label. Work that this thread enqueues belongs to it.
    pub(super) fn enter(&self, label: u64) -> Result<(), String> {
        let kind = External::CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
        activity::push_external_correlation_id(kind, label).map_err(words)
    }

    /// Ends the region of a label.
    pub(super) fn leave(&self) -> Result<(), String> {
        let kind = External::CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
        let mut last = 0;
        // SAFETY: the output is a local number.
        unsafe { activity::pop_external_correlation_id(kind, &raw mut last) }.map_err(words)
    }

    /// Returns start and end of each label's work, in nanoseconds of the host's clock. The device
    /// must be idle.
    pub(super) fn spans(&self) -> Result<BTreeMap<u64, (u64, u64)>, String> {
        const FORCED: u32 = 1;
        activity::flush_all(FORCED).map_err(words)?;
        let collected = lock(&COLLECTED);
        let here = |t: u64| u64::try_from(i128::from(t) + self.offset).unwrap_or(0);
        Ok(join(&collected)
            .into_iter()
            .map(|(label, (start, end))| (label, (here(start), here(end))))
            .collect())
    }
}

impl Drop for Activity {
    fn drop(&mut self) {
        for kind in KINDS {
            // Errors cannot be handled here.
            let _ = activity::disable(kind);
        }
    }
}

/// Returns the first start and the last end for each label.
fn join(collected: &Collected) -> BTreeMap<u64, (u64, u64)> {
    let labels: BTreeMap<u32, u64> = collected.labels.iter().copied().collect();
    let mut spans: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for &(correlation, start, end) in &collected.work {
        // CUPTI's value for times that it could not determine.
        if (start, end) == (0, 0) {
            continue;
        }
        let Some(&label) = labels.get(&correlation) else {
            continue;
        };
        let span = spans.entry(label).or_insert((start, end));
        *span = (span.0.min(start), span.1.max(end));
    }
    spans
}

/// Callback: CUPTI requests a buffer.
unsafe extern "C" fn request(buffer: *mut *mut u8, size: *mut usize, records: *mut usize) {
    // SAFETY: the layout is not empty; CUPTI passes addresses for its three results. A null buffer
    // drops records.
    unsafe {
        buffer.write(alloc(LAYOUT));
        size.write(BUFFER);
        records.write(0);
    }
}

/// Callback: CUPTI returns a buffer.
unsafe extern "C" fn complete(_: CUcontext, _: u32, buffer: *mut u8, _: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    let mut collected = lock(&COLLECTED);
    let mut record: *mut sys::CUpti_Activity = std::ptr::null_mut();
    // SAFETY: `valid` bytes of the buffer hold records; CUPTI walks them.
    while unsafe { activity::get_next_record(buffer, valid, &raw mut record) }.is_ok() {
        // SAFETY: a record starts with its kind, which is read as a number because newer versions
        // may have unknown kinds.
        let kind = unsafe { record.cast::<u32>().read_unaligned() };
        // SAFETY: the record has this kind's layout; newer versions only append to it.
        unsafe { collected.take(kind, record.cast()) };
    }
    drop(collected);
    // SAFETY: allocated by `request`.
    unsafe { dealloc(buffer, LAYOUT) };
}

impl Collected {
    /// # Safety
    /// Reads a record of type `T`.
    unsafe fn take(&mut self, kind: u32, record: *const u8) {
        /// Reads fields of a packed C structure.
        macro_rules! fields {
            ($type:ty, $($field:ident),+) => {{
                let it = record.cast::<$type>();
                // SAFETY: the record is of this type.
                unsafe { ($((&raw const (*it).$field).read_unaligned()),+) }
            }};
        }
        let is = |k: Kind| kind == k as u32;
        if is(Kind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            let work = fields!(CUpti_ActivityKernel9, correlationId, start, end);
            self.work.push(work);
        } else if is(Kind::CUPTI_ACTIVITY_KIND_MEMCPY) {
            let work = fields!(CUpti_ActivityMemcpy6, correlationId, start, end);
            self.work.push(work);
        } else if is(Kind::CUPTI_ACTIVITY_KIND_MEMCPY2) {
            let work = fields!(CUpti_ActivityMemcpyPtoP4, correlationId, start, end);
            self.work.push(work);
        } else if is(Kind::CUPTI_ACTIVITY_KIND_MEMSET) {
            let work = fields!(CUpti_ActivityMemset4, correlationId, start, end);
            self.work.push(work);
        } else if is(Kind::CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION) {
            let label = fields!(CUpti_ActivityExternalCorrelation, correlationId, externalId);
            self.labels.push(label);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_covers_all_of_its_work() {
        let collected = Collected {
            labels: vec![(1, 10), (2, 10), (3, 11)],
            // One record has no label, and one has no times.
            work: vec![(2, 50, 60), (1, 20, 30), (9, 0, 99), (3, 70, 80), (1, 0, 0)],
        };
        let spans: Vec<_> = join(&collected).into_iter().collect();
        assert_eq!(spans, [(10, (20, 60)), (11, (70, 80))]);
    }
}
