//! Traces of the PyTorch profiler (Kineto), as Chrome JSON.
//!
//! Source of the format: `output_json.cpp` of pytorch/kineto. Every key is optional; traces of older versions lack most.

mod event;
mod root;
mod scan;

pub use root::{Group, Head};

use crate::ImportError;
use crate::names::{NameId, Names};
use event::{Arguments, Event, integer, nanos};
use scan::{Fault, Item, Scanner};
use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::path::Path;

/// Malformed events of which the place is kept.
const PLACES: usize = 3;

/// A span of host time: an operator, or a range that was annotated.
#[derive(Clone, Copy, Debug)]
pub struct HostEvent {
    /// Start, nanoseconds.
    pub start: i64,
    /// End, nanoseconds.
    pub end: i64,
    /// Name.
    pub name: NameId,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
    /// Whether it is an annotation rather than an operator.
    pub is_annotation: bool,
    /// Id that device events refer to.
    pub external: Option<u32>,
    /// Autograd's sequence number.
    pub sequence: Option<u32>,
    /// Thread that ran forward, by autograd's count; 0 for forward operators.
    pub forward_thread: u32,
    /// Shapes and types of its inputs, an index into [`Trace::inputs`].
    pub inputs: Option<u32>,
}

/// Inputs of an operator, as the profiler's JSON has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Inputs {
    /// Dimensions.
    pub dims: NameId,
    /// Types.
    pub types: NameId,
    /// Values of scalars and lists of scalars.
    pub concrete: NameId,
}

/// A call of the CUDA runtime or driver.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Start, nanoseconds.
    pub start: i64,
    /// End, nanoseconds.
    pub end: i64,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
    /// Correlation of device work.
    pub correlation: u32,
    /// Name.
    pub name: NameId,
}

/// What a device event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Kernel.
    Kernel,
    /// Copy by a copy engine.
    Copy,
    /// Fill.
    Fill,
}

/// Work on a device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceEvent {
    /// Start, nanoseconds.
    pub start: i64,
    /// End, nanoseconds.
    pub end: i64,
    /// Name.
    pub name: NameId,
    /// Kind.
    pub kind: DeviceKind,
    /// Device.
    pub device: u32,
    /// Stream.
    pub stream: u32,
    /// Correlation with the call that launched it.
    pub correlation: Option<u32>,
    /// Id of the operator that launched it.
    pub external: Option<u32>,
    /// Bytes copied or filled.
    pub bytes: u64,
    /// Description, an index into [`Trace::collectives`].
    pub collective: Option<u32>,
}

/// Arguments of a collective.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Collective {
    /// Name that PyTorch gives it, such as `_allgather_base`.
    pub name: String,
    /// Elements that a rank sends.
    pub elements_in: u64,
    /// Elements that a rank receives.
    pub elements_out: u64,
    /// Ranks of the group.
    pub group_size: u32,
    /// Element type, such as `BFloat16`.
    pub dtype: String,
    /// Name of the process group.
    pub group: String,
    /// Description of the process group.
    pub about: String,
    /// Ranks of the group as text; may be elided.
    pub ranks: String,
}

/// A call of `record_param_comms`, which describes a collective.
#[derive(Clone, Copy, Debug)]
pub struct CollectiveCall {
    /// Index into [`Trace::host`], while events are in the order of the file.
    pub start: i64,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
    /// Id that device events refer to.
    pub external: Option<u32>,
    /// Description, an index into [`Trace::collectives`].
    pub collective: u32,
}

/// A forward operator, or the backward operator that belongs to it.
#[derive(Clone, Copy, Debug)]
pub struct Flow {
    /// Number that both ends share.
    pub id: u64,
    /// Start of the operator, nanoseconds.
    pub at: i64,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
}

/// An allocation or a free of device memory.
#[derive(Clone, Copy, Debug)]
pub struct MemoryEvent {
    /// Time, nanoseconds.
    pub at: i64,
    /// Thread, an index into [`Trace::threads`].
    pub thread: u32,
    /// Bytes; negative for a free.
    pub bytes: i64,
    /// Address.
    pub address: u64,
    /// Allocated bytes after it.
    pub allocated: u64,
    /// Reserved bytes after it.
    pub reserved: u64,
    /// Device.
    pub device: u32,
}

/// A trace of one rank.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// What stands around the events.
    pub head: Head,
    /// Texts that events refer to.
    pub names: Names,
    /// Process and thread, as the file writes them.
    pub threads: Vec<(String, String)>,
    /// Operators and annotations.
    pub host: Vec<HostEvent>,
    /// Inputs of operators.
    pub inputs: Vec<Inputs>,
    /// Calls of the CUDA runtime and driver.
    pub launches: Vec<Launch>,
    /// Device work.
    pub device: Vec<DeviceEvent>,
    /// Descriptions of collectives, each once.
    pub collectives: Vec<Collective>,
    /// Calls of collectives.
    pub calls: Vec<CollectiveCall>,
    /// Forward ends of flows from forward to backward.
    pub forward: Vec<Flow>,
    /// Backward ends of them.
    pub backward: Vec<Flow>,
    /// Allocations and frees of device memory.
    pub memory: Vec<MemoryEvent>,
    /// Events that are understood but carry no work (names, flows to the device, synchronization), by category.
    pub context: BTreeMap<String, u64>,
    /// Events of unknown kinds, by category.
    pub unknown: BTreeMap<String, u64>,
    /// Events that are not valid.
    pub malformed: u64,
    /// What a reader should know: where the file was cut off, where events are malformed.
    pub notes: Vec<String>,
    /// Bytes of text.
    pub bytes: u64,
    /// Events in all.
    pub events: u64,
}

impl Trace {
    /// Returns the name of an event.
    #[must_use]
    pub fn name(&self, id: NameId) -> &str {
        self.names.get(id)
    }
}

/// Reads a trace.
///
/// # Errors
/// When the file is no trace. A file that ends too early is read up to there, with a note.
pub fn read(from: impl Read, path: &Path) -> Result<Trace, ImportError> {
    let mut builder = Builder::default();
    let mut scanner = Scanner::new(from);
    loop {
        let bad = match scanner.next() {
            Ok(Some(Item::Event(text))) => {
                builder.trace.events += 1;
                match builder.event(text) {
                    Ok(()) => continue,
                    Err(reason) => Some((text.to_vec(), reason)),
                }
            }
            Ok(Some(Item::Field(key, value))) => {
                builder.trace.head.take(&key, value);
                continue;
            }
            Ok(None) => break,
            Err(Fault::CutOff(at)) if builder.trace.events > 0 => {
                builder.note(format!(
                    "the file ends within the events, after {at} bytes: it was cut off; {} events were read",
                    builder.trace.events
                ));
                break;
            }
            Err(Fault::Io(at, e)) if builder.trace.events > 0 => {
                builder.note(format!(
                    "the file cannot be read further after {at} bytes ({e}): it was cut off; {} events were read",
                    builder.trace.events
                ));
                break;
            }
            Err(Fault::Syntax(place, reason)) if builder.trace.events > 0 => {
                builder.malformed(place, &reason);
                if !scanner.skip() {
                    break;
                }
                continue;
            }
            Err(fault) => return Err(refused(fault, path)),
        };
        if let Some((text, reason)) = bad {
            let place = scanner.here();
            builder.malformed(place, &reason);
            if !scanner.resume(&text) {
                break;
            }
        }
    }
    builder.trace.bytes = scanner.offset();
    if builder.trace.events == 0 {
        return Err(ImportError::invalid(path, "the trace has no events"));
    }
    Ok(builder.finish())
}

fn refused(fault: Fault, path: &Path) -> ImportError {
    match fault {
        Fault::CutOff(at) => ImportError::invalid(
            path,
            format!("the file ends after {at} bytes, before the first event"),
        ),
        Fault::Syntax(place, reason) => ImportError::Invalid {
            path: format!("{}:{}:{}", path.display(), place.line, place.column).into(),
            reason,
        },
        Fault::Io(_, e) => ImportError::io(path, e),
    }
}

#[derive(Default)]
struct Builder {
    trace: Trace,
    threads: HashMap<(String, String), u32>,
    inputs: HashMap<Inputs, u32>,
    collectives: HashMap<Collective, u32>,
    last_thread: Option<u32>,
}

impl Builder {
    fn note(&mut self, text: String) {
        self.trace.notes.push(text);
    }

    fn malformed(&mut self, place: scan::Position, reason: &str) {
        self.trace.malformed += 1;
        if self.trace.malformed <= PLACES as u64 {
            self.note(format!(
                "malformed event before line {}, column {}: {reason}",
                place.line, place.column
            ));
        }
    }

    fn thread(&mut self, event: &Event<'_>) -> u32 {
        if let Some(last) = self.last_thread {
            let (pid, tid) = &self.trace.threads[last as usize];
            if pid == event.pid && tid == event.tid {
                return last;
            }
        }
        let key = (event.pid.to_owned(), event.tid.to_owned());
        let next = self.trace.threads.len() as u32;
        let index = *self.threads.entry(key).or_insert_with_key(|key| {
            self.trace.threads.push(key.clone());
            next
        });
        self.last_thread = Some(index);
        index
    }

    fn count(map: &mut BTreeMap<String, u64>, key: &str) {
        match map.get_mut(key) {
            Some(n) => *n += 1,
            None => {
                map.insert(key.to_owned(), 1);
            }
        }
    }

    fn event(&mut self, text: &[u8]) -> Result<(), String> {
        let event: Event<'_> = event::read(text).map_err(|e| e.to_string())?;
        match (&*event.ph, &*event.cat) {
            ("X", "cpu_op" | "user_annotation" | "Operator") => self.host(&event),
            ("X", "cuda_runtime" | "cuda_driver" | "Runtime") => self.launch(&event),
            ("X", "kernel" | "Kernel") => self.device(&event, DeviceKind::Kernel),
            ("X", "gpu_memcpy" | "Memcpy") => self.device(&event, DeviceKind::Copy),
            ("X", "gpu_memset" | "Memset") => self.device(&event, DeviceKind::Fill),
            ("s" | "f", "fwdbwd") => self.flow(&event),
            ("i", "cpu_instant_event") if event.name == "[memory]" => self.memory(&event),
            ("X", "gpu_user_annotation" | "cuda_sync" | "cuda_event" | "overhead" | "python_function" | "Trace"
                | "cuda_profiler_range" | "ac2g")
            | ("s" | "f" | "t", "ac2g" | "async_cpu_to_gpu" | "forward_backward" | "async_gpu") => {
                Self::count(&mut self.trace.context, &event.cat);
                Ok(())
            }
            ("M", _) => {
                Self::count(&mut self.trace.context, "names");
                Ok(())
            }
            ("i", _) if event.name.starts_with("Iteration Start") || event.name == "Record Window End" => {
                Self::count(&mut self.trace.context, "marks");
                Ok(())
            }
            ("", _) => Err("`ph` is missing".to_owned()),
            (ph, "") => {
                Self::count(&mut self.trace.unknown, &format!("ph {ph}"));
                Ok(())
            }
            (_, cat) => {
                Self::count(&mut self.trace.unknown, cat);
                Ok(())
            }
        }
    }

    fn arguments<'a>(event: &Event<'a>) -> Result<Arguments<'a>, String> {
        if event.args.is_empty() {
            return Ok(Arguments::default());
        }
        event::read(event.args.as_bytes()).map_err(|e| format!("args: {e}"))
    }

    fn host(&mut self, event: &Event<'_>) -> Result<(), String> {
        let (start, end) = span(event)?;
        let a = Self::arguments(event)?;
        let thread = self.thread(event);
        let external = small(a.external);
        let names = &mut self.trace.names;
        let inputs = (!a.dims.is_empty() || !a.concrete.is_empty()).then(|| Inputs {
            dims: names.id(a.dims),
            types: names.id(a.types),
            concrete: names.id(a.concrete),
        });
        let inputs = inputs.map(|inputs| {
            let next = self.trace.inputs.len() as u32;
            *self.inputs.entry(inputs).or_insert_with(|| {
                self.trace.inputs.push(inputs);
                next
            })
        });
        if !a.collective.is_empty() {
            let collective = self.collective(&a);
            self.trace.calls.push(CollectiveCall {
                start,
                thread,
                external,
                collective,
            });
        }
        self.trace.host.push(HostEvent {
            start,
            end,
            name: self.trace.names.id(&event.name),
            thread,
            is_annotation: event.cat == "user_annotation",
            external,
            sequence: small(a.sequence),
            forward_thread: small(a.forward_thread).unwrap_or(0),
            inputs,
        });
        Ok(())
    }

    fn collective(&mut self, a: &Arguments<'_>) -> u32 {
        let size = |raw: &str| integer(raw).and_then(|n| u64::try_from(n).ok()).unwrap_or(0);
        let collective = Collective {
            name: a.collective.to_string(),
            elements_in: size(a.elements_in),
            elements_out: size(a.elements_out),
            group_size: small(a.group_size).unwrap_or(0),
            dtype: a.dtype.to_string(),
            group: a.group.to_string(),
            about: a.group_about.to_string(),
            ranks: a.group_ranks.to_string(),
        };
        let next = self.trace.collectives.len() as u32;
        *self.collectives.entry(collective).or_insert_with_key(|key| {
            self.trace.collectives.push(key.clone());
            next
        })
    }

    fn launch(&mut self, event: &Event<'_>) -> Result<(), String> {
        let (start, end) = span(event)?;
        let a = Self::arguments(event)?;
        let Some(correlation) = small(a.correlation) else {
            Self::count(&mut self.trace.context, "runtime calls without device work");
            return Ok(());
        };
        let thread = self.thread(event);
        self.trace.launches.push(Launch {
            start,
            end,
            thread,
            correlation,
            name: self.trace.names.id(&event.name),
        });
        Ok(())
    }

    fn device(&mut self, event: &Event<'_>, kind: DeviceKind) -> Result<(), String> {
        let (start, end) = span(event)?;
        let a = Self::arguments(event)?;
        let collective = (!a.collective.is_empty()).then(|| self.collective(&a));
        // Process and thread of a device event are its device and stream.
        let number = |argument: &str, field: &str| small(argument).or_else(|| small(field)).unwrap_or(0);
        self.trace.device.push(DeviceEvent {
            start,
            end,
            name: self.trace.names.id(&event.name),
            kind,
            device: number(a.device, event.pid),
            stream: number(a.stream, event.tid),
            correlation: small(a.correlation).filter(|&c| c != 0),
            external: small(a.external).filter(|&e| e != 0),
            bytes: integer(a.bytes).and_then(|n| u64::try_from(n).ok()).unwrap_or(0),
            collective,
        });
        Ok(())
    }

    fn flow(&mut self, event: &Event<'_>) -> Result<(), String> {
        let at = nanos(event.ts).ok_or("`ts` is no number")?;
        let id = integer(event.id).ok_or("`id` is no number")?;
        let flow = Flow {
            id: id.cast_unsigned(),
            at,
            thread: self.thread(event),
        };
        if event.ph == "s" {
            self.trace.forward.push(flow);
        } else {
            self.trace.backward.push(flow);
        }
        Ok(())
    }

    fn memory(&mut self, event: &Event<'_>) -> Result<(), String> {
        let at = nanos(event.ts).ok_or("`ts` is no number")?;
        let a = Self::arguments(event)?;
        // Device type 1 is CUDA; host memory is no matter here.
        if integer(a.device_type) != Some(1) {
            Self::count(&mut self.trace.context, "host memory");
            return Ok(());
        }
        let size = |raw: &str| integer(raw).map_or(0, |n| u64::try_from(n).unwrap_or(0));
        let thread = self.thread(event);
        self.trace.memory.push(MemoryEvent {
            at,
            thread,
            bytes: integer(a.memory_bytes).unwrap_or(0),
            address: size(a.address),
            allocated: size(a.allocated),
            reserved: size(a.reserved),
            device: small(a.device_id).unwrap_or(0),
        });
        Ok(())
    }

    fn finish(mut self) -> Trace {
        let trace = &mut self.trace;
        if trace.malformed > PLACES as u64 {
            let n = trace.malformed;
            trace.notes.push(format!("{n} events are malformed in all"));
        }
        trace.host.sort_by(|a, b| {
            (a.thread, a.start, -a.end, !a.is_annotation).cmp(&(b.thread, b.start, -b.end, !b.is_annotation))
        });
        trace.launches.sort_by_key(|l| (l.correlation, l.start));
        trace.device.sort_by_key(|d| (d.start, d.end));
        trace.calls.sort_by_key(|c| c.start);
        trace.memory.sort_by_key(|m| m.at);
        self.trace
    }
}

fn span(event: &Event<'_>) -> Result<(i64, i64), String> {
    let start = nanos(event.ts).ok_or("`ts` is no number")?;
    let dur = if event.dur.is_empty() {
        0
    } else {
        nanos(event.dur).ok_or("`dur` is no number")?
    };
    let end = start.checked_add(dur.max(0)).ok_or("`dur` is too large")?;
    Ok((start, end))
}

fn small(raw: &str) -> Option<u32> {
    integer(raw).and_then(|n| u32::try_from(n).ok())
}
