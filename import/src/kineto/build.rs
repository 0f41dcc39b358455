//! Converts the events of a file to those of a trace.

use super::event::{self, Arguments, Event, integer, nanos};
use super::scan;
use super::types::{
    Collective, CollectiveCall, DeviceEvent, DeviceKind, Flow, HostEvent, Inputs, Launch,
    MemoryEvent, Trace,
};
use crate::limits;
use std::collections::{BTreeMap, HashMap};

/// Maximum number of malformed events whose positions are kept.
const PLACES: usize = 3;

#[derive(Default)]
pub(super) struct Builder {
    pub(super) trace: Trace,
    threads: HashMap<(String, String), u32>,
    inputs: HashMap<Inputs, u32>,
    collectives: HashMap<Collective, u32>,
    last_thread: Option<u32>,
}

impl Builder {
    pub(super) fn note(&mut self, text: String) {
        self.trace.notes.push(text);
    }

    /// Notes, before everything else, that the rest of the file is missing.
    pub(super) fn cut_off(&mut self, text: String) {
        self.trace.is_cut_off = true;
        self.trace.notes.insert(0, text);
    }

    pub(super) fn malformed(&mut self, place: scan::Position, reason: &str) {
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

    pub(super) fn event(&mut self, text: &[u8]) -> Result<(), String> {
        let event: Event<'_> = event::read(text).map_err(|e| e.to_string())?;
        match (&*event.ph, &*event.cat) {
            ("X", "cpu_op" | "user_annotation" | "Operator") => self.host(&event),
            ("X", "cuda_runtime" | "cuda_driver" | "Runtime") => self.launch(&event),
            ("X", "kernel" | "Kernel") => self.device(&event, DeviceKind::Kernel),
            ("X", "gpu_memcpy" | "Memcpy") => self.device(&event, DeviceKind::Copy),
            ("X", "gpu_memset" | "Memset") => self.device(&event, DeviceKind::Fill),
            ("s" | "f", "fwdbwd") => self.flow(&event),
            ("i", "cpu_instant_event") if event.name == "[memory]" => self.memory(&event),
            (
                "X",
                "gpu_user_annotation"
                | "cuda_sync"
                | "cuda_event"
                | "overhead"
                | "python_function"
                | "Trace"
                | "cuda_profiler_range"
                | "ac2g",
            )
            | ("s" | "f" | "t", "ac2g" | "async_cpu_to_gpu" | "forward_backward" | "async_gpu") => {
                Self::count(&mut self.trace.context, &event.cat);
                Ok(())
            }
            ("M", _) => {
                Self::count(&mut self.trace.context, "names");
                Ok(())
            }
            ("i", _)
                if event.name.starts_with("Iteration Start")
                    || event.name == "Record Window End" =>
            {
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

    fn arguments<'e, 'a>(event: &'e Event<'a>) -> Result<&'e Arguments<'a>, String> {
        let args = event.args.0.as_ref();
        args.ok_or_else(|| "args: an object is expected".to_owned())
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
            let collective = self.collective(a);
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
        let elements = |raw: &str| {
            let n = integer(raw).and_then(|n| u64::try_from(n).ok());
            n.filter(|n| *n <= limits::ELEMENTS).unwrap_or(0)
        };
        let collective = Collective {
            name: a.collective.to_string(),
            elements_in: elements(a.elements_in),
            elements_out: elements(a.elements_out),
            group_size: small(a.group_size).unwrap_or(0),
            dtype: a.dtype.to_string(),
            group: a.group.to_string(),
            about: a.group_about.to_string(),
            ranks: a.group_ranks.to_string(),
        };
        let next = self.trace.collectives.len() as u32;
        *self
            .collectives
            .entry(collective)
            .or_insert_with_key(|key| {
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
        let collective = (!a.collective.is_empty()).then(|| self.collective(a));
        // The process and thread of a device event are its device and stream.
        let number =
            |argument: &str, field: &str| small(argument).or_else(|| small(field)).unwrap_or(0);
        self.trace.device.push(DeviceEvent {
            start,
            end,
            name: self.trace.names.id(&event.name),
            kind,
            device: number(a.device, event.pid),
            stream: number(a.stream, event.tid),
            correlation: small(a.correlation).filter(|&c| c != 0),
            external: small(a.external).filter(|&e| e != 0),
            bytes: size(a.bytes)?,
            collective,
        });
        Ok(())
    }

    fn flow(&mut self, event: &Event<'_>) -> Result<(), String> {
        let at = time(event)?;
        let id = integer(event.id).ok_or("`id` is not a number")?;
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
        let at = time(event)?;
        let a = Self::arguments(event)?;
        // Device type 1 is CUDA; host memory is ignored.
        if integer(a.device_type) != Some(1) {
            Self::count(&mut self.trace.context, "host memory");
            return Ok(());
        }
        let bytes = integer(a.memory_bytes).unwrap_or(0);
        if bytes.unsigned_abs() > limits::BYTES {
            return Err(format!("{bytes} bytes are more than a device has"));
        }
        let (allocated, reserved) = (size(a.allocated)?, size(a.reserved)?);
        let thread = self.thread(event);
        self.trace.memory.push(MemoryEvent {
            at,
            thread,
            bytes,
            address: integer(a.address).unwrap_or(0).cast_unsigned(),
            allocated,
            reserved,
            device: small(a.device_id).unwrap_or(0),
        });
        Ok(())
    }

    pub(super) fn finish(mut self) -> Trace {
        let trace = &mut self.trace;
        keep_plausible(trace);
        if trace.malformed > PLACES as u64 {
            let n = trace.malformed;
            trace
                .notes
                .push(format!("{n} events are malformed in total"));
        }
        sorted(self.trace)
    }
}

fn span(event: &Event<'_>) -> Result<(i64, i64), String> {
    let start = time(event)?;
    let dur = if event.dur.is_empty() {
        0
    } else {
        nanos(event.dur).ok_or("`dur` is not a number")?
    };
    match dur.max(0) {
        dur if dur > limits::SPREAD => Err("`dur` is too large".to_owned()),
        dur => Ok((start, start + dur)),
    }
}

fn time(event: &Event<'_>) -> Result<i64, String> {
    let at = nanos(event.ts).ok_or("`ts` is not a number")?;
    match at.unsigned_abs() > limits::TIME.unsigned_abs() {
        true => Err("`ts` is too large".to_owned()),
        false => Ok(at),
    }
}

/// Reads a size in bytes. 0 stands for a missing or negative one.
fn size(raw: &str) -> Result<u64, String> {
    let n = integer(raw).map_or(0, |n| u64::try_from(n).unwrap_or(0));
    match n > limits::BYTES {
        true => Err(format!("{n} bytes are more than a device has")),
        false => Ok(n),
    }
}

fn small(raw: &str) -> Option<u32> {
    integer(raw).and_then(|n| u32::try_from(n).ok())
}

/// Removes work that is far away from the rest of the trace or takes too long, because its times
/// are damaged.
pub(crate) fn keep_plausible(trace: &mut Trace) {
    let mut starts: Vec<i64> = match trace.device.is_empty() {
        true => trace.host.iter().map(|e| e.start).collect(),
        false => trace.device.iter().map(|e| e.start).collect(),
    };
    if starts.is_empty() {
        return;
    }
    let half = starts.len() / 2;
    let middle = *starts.select_nth_unstable(half).1;
    let near = |at: i64| (at - middle).abs() <= limits::SPREAD;
    let events = |t: &Trace| {
        t.host.len() + t.launches.len() + t.device.len() + t.calls.len() + t.memory.len()
    };
    let before = events(trace);
    trace.host.retain(|e| near(e.start) && near(e.end));
    trace.launches.retain(|e| near(e.start) && near(e.end));
    trace.device.retain(|e| {
        let time = e.end.checked_sub(e.start);
        near(e.start) && time.is_some_and(|t| t <= limits::MAX_DURATION)
    });
    trace.calls.retain(|e| near(e.start));
    trace.memory.retain(|e| near(e.at));
    let removed = before - events(trace);
    if removed > 0 {
        trace.malformed += removed as u64;
        trace.notes.push(format!(
            "{removed} events are a day away from the others, or take more than an hour: their times are damaged"
        ));
    }
}

/// Sorts the events of a trace as its readers expect them.
pub(crate) fn sorted(mut trace: Trace) -> Trace {
    trace.host.sort_by(|a, b| {
        (a.thread, a.start, -a.end, !a.is_annotation).cmp(&(
            b.thread,
            b.start,
            -b.end,
            !b.is_annotation,
        ))
    });
    trace.launches.sort_by_key(|l| (l.correlation, l.start));
    trace.device.sort_by_key(|d| (d.start, d.end));
    trace.calls.sort_by_key(|c| c.start);
    trace.memory.sort_by_key(|m| m.at);
    trace
}
