//! Traces of the PyTorch profiler (Kineto), as Chrome JSON.
//!
//! Source of the format: `output_json.cpp` of pytorch/kineto. Every key is optional, since traces
//! of older versions lack most.

mod build;
mod event;
mod root;
mod scan;
mod types;

pub use root::{Group, Head, Recorder};
pub use types::{
    Collective, CollectiveCall, DeviceEvent, DeviceKind, Flow, HostEvent, Inputs, Launch,
    MemoryEvent, Trace,
};

pub(crate) use build::{keep_plausible, sorted};

use crate::ImportError;
use build::Builder;
use scan::{Fault, Item, Scanner};
use std::io::Read;
use std::path::Path;

/// Reads a trace. If the file ends too early, reads all complete events and adds a note.
///
/// # Errors
/// Fails if the file is not a trace.
pub fn read(from: impl Read, path: &Path) -> Result<Trace, ImportError> {
    let mut builder = Builder::default();
    let mut scanner = Scanner::new(from);
    loop {
        let bad = match scanner.next() {
            Ok(Some(Item::Event(text))) => {
                builder.trace.events += 1;
                match builder.event(text) {
                    Ok(()) => continue,
                    Err(reason) => Ok((text.to_vec(), reason)),
                }
            }
            Ok(Some(Item::Field(key, value))) => {
                builder.trace.head.take(&key, value);
                continue;
            }
            Ok(None) => break,
            Err(fault) => Err(fault),
        };
        match bad {
            Ok((text, reason)) => {
                builder.malformed(scanner.here(), &reason);
                if !scanner.resume(&text) {
                    break;
                }
            }
            Err(fault) => {
                if !go_on(&mut builder, &mut scanner, fault).map_err(|f| refused(f, path))? {
                    break;
                }
            }
        }
    }
    builder.trace.bytes = scanner.offset();
    if builder.trace.events == 0 {
        return Err(ImportError::invalid(path, "the trace has no events"));
    }
    Ok(builder.finish())
}

/// Continues after an error if possible. Returns whether there is more to read.
fn go_on<R: Read>(
    builder: &mut Builder,
    scanner: &mut Scanner<R>,
    fault: Fault,
) -> Result<bool, Fault> {
    let read = builder.trace.events;
    match fault {
        // An unescaped quote may hide the end of its event, up to the end of the file.
        Fault::CutOff(_) | Fault::Syntax(..) if scanner.skip() => {
            let reason = match fault {
                Fault::Syntax(_, reason) => reason,
                _ => "the event does not end".to_owned(),
            };
            builder.malformed(scanner.here(), &reason);
            Ok(true)
        }
        Fault::CutOff(at) if read > 0 => {
            builder.cut_off(format!(
                "the file ends within the events, after {at} bytes: it was cut off; {read} events were read"
            ));
            Ok(false)
        }
        Fault::Io(at, e) if read > 0 => {
            builder.cut_off(format!(
                "the file cannot be read further after {at} bytes ({e}): it was cut off; {read} events were read"
            ));
            Ok(false)
        }
        Fault::Syntax(place, reason) if read > 0 => {
            builder.malformed(place, &reason);
            builder.trace.is_cut_off = true;
            Ok(false)
        }
        fault => Err(fault),
    }
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
