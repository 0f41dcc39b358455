//! Exports of Nsight Systems (`nsys export --type sqlite`).
//!
//! Tables and columns are those of the exporter's documented schema. Kernels and steps were
//! compared with public exports, units and phases were not, and imported runs say so. Columns vary
//! between versions, and missing ones are ignored. NVTX ranges (from PyTorch's `emit_nvtx` or from
//! Megatron) stand for operators and annotations. Each process with device work is a rank.

use crate::ImportError;
use crate::kineto::{self, DeviceEvent, DeviceKind, HostEvent, Launch, Recorder, Trace};
use crate::limits;
use crate::sqlite::{Database, Table, Value};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Table that every export with device work has.
const KERNELS: &str = "CUPTI_ACTIVITY_KIND_KERNEL";
/// Table of CUDA graphs that are traced as a whole, which is the default of `nsys profile`
/// (`--cuda-graph-trace=graph`). The kernels within them are not in the export.
const GRAPHS: &str = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE";
/// Types of NVTX ranges: those that a thread pushes and pops, and those with separate start and
/// end.
const RANGES: [i64; 2] = [59, 60];

/// Reads an export: a trace per process with device work, by process id.
///
/// # Errors
/// Fails if the file is a database of another tool, is damaged, or has no device work.
pub(crate) fn read(path: &Path) -> Result<Vec<Trace>, ImportError> {
    let mut file = File::open(path).map_err(|e| ImportError::io(path, e))?;
    let mut magic = [0; 2];
    if file.read(&mut magic).is_ok_and(|n| n == 2) && magic == [0x1f, 0x8b] {
        return Err(ImportError::invalid(
            path,
            "an SQLite database compressed by gzip; decompress it first (gunzip)",
        ));
    }
    let damaged = |e: io::Error| match e.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
            ImportError::invalid(path, e.to_string())
        }
        _ => ImportError::io(path, e),
    };
    let mut database = Database::open(file).map_err(damaged)?;
    if database.table(KERNELS).is_none() && database.table(GRAPHS).is_none() {
        let is_export = database
            .names()
            .any(|n| n == "StringIds" || n.starts_with("CUPTI_"));
        let reason = match is_export {
            true => format!("the export has no table {KERNELS}: no GPU work was recorded"),
            false => {
                let tables: Vec<&str> = database.names().take(5).collect();
                format!(
                    "an SQLite database of another tool (tables: {}); an export of Nsight Systems has {KERNELS}",
                    tables.join(", ")
                )
            }
        };
        return Err(ImportError::invalid(path, reason));
    }
    let mut export = Export::default();
    export.fill(&mut database).map_err(damaged)?;
    let bytes = path.metadata().map_or(0, |m| m.len());
    let traces = export.finish(bytes);
    if traces.is_empty() {
        return Err(ImportError::invalid(
            path,
            "the export contains no GPU work",
        ));
    }
    Ok(traces)
}

/// The data of an export, by process.
#[derive(Default)]
struct Export {
    strings: HashMap<i64, String>,
    devices: BTreeMap<i64, String>,
    processes: BTreeMap<i64, Trace>,
    threads: HashMap<(i64, i64), u32>,
    /// Ranges without an end, and rows without a time.
    incomplete: u64,
}

/// A row with the names of its columns.
struct Row<'a> {
    table: &'a Table,
    values: &'a [Value],
}

impl Row<'_> {
    fn get(&self, column: &str) -> Option<&Value> {
        self.values.get(self.table.column(column)?)
    }

    fn int(&self, column: &str) -> Option<i64> {
        self.get(column)?.int()
    }

    /// Returns the process and the thread. Process ids are 24 bits above thread ids.
    fn owner(&self, column: &str) -> Option<(i64, i64)> {
        let id = self.int(column)?;
        Some(((id >> 24) & 0xff_ffff, id & 0xff_ffff))
    }
}

impl Export {
    fn fill(&mut self, database: &mut Database) -> io::Result<()> {
        each(database, "StringIds", &mut |row| {
            if let (Some(id), Some(text)) = (row.int("id"), row.get("value").and_then(Value::text))
            {
                self.strings.insert(id, text.to_owned());
            }
        })?;
        each(database, "TARGET_INFO_GPU", &mut |row| {
            if let (Some(id), Some(name)) = (row.int("id"), row.get("name").and_then(Value::text)) {
                self.devices.insert(id, name.to_owned());
            }
        })?;
        for (table, kind) in [
            (KERNELS, DeviceKind::Kernel),
            (GRAPHS, DeviceKind::Graph),
            ("CUPTI_ACTIVITY_KIND_MEMCPY", DeviceKind::Copy),
            ("CUPTI_ACTIVITY_KIND_MEMSET", DeviceKind::Fill),
        ] {
            each(database, table, &mut |row| self.device(row, kind))?;
        }
        each(database, "CUPTI_ACTIVITY_KIND_RUNTIME", &mut |row| {
            self.launch(row);
        })?;
        each(database, "NVTX_EVENTS", &mut |row| self.range(row))
    }

    fn span(&mut self, row: &Row<'_>) -> Option<(i64, i64)> {
        let plausible = |t: &i64| t.unsigned_abs() <= limits::TIME.unsigned_abs();
        let time = |column: &str| row.int(column).filter(plausible);
        let span = time("start").zip(time("end"));
        self.incomplete += u64::from(span.is_none());
        span
    }

    fn trace(&mut self, process: i64) -> &mut Trace {
        self.processes.entry(process).or_default()
    }

    fn thread(&mut self, (process, thread): (i64, i64)) -> u32 {
        let trace = self.processes.entry(process).or_default();
        *self.threads.entry((process, thread)).or_insert_with(|| {
            trace
                .threads
                .push((process.to_string(), thread.to_string()));
            trace.threads.len() as u32 - 1
        })
    }

    fn string(&self, row: &Row<'_>, columns: &[&str]) -> String {
        let mut ids = columns.iter().filter_map(|c| row.int(c));
        let text = ids.find_map(|id| self.strings.get(&id));
        text.cloned().unwrap_or_default()
    }

    fn device(&mut self, row: &Row<'_>, kind: DeviceKind) {
        let Some((start, end)) = self.span(row) else {
            return;
        };
        let process = row.owner("globalPid").map_or(0, |o| o.0);
        let name = match kind {
            DeviceKind::Kernel => self.string(row, &["demangledName", "shortName"]),
            DeviceKind::Copy => copy(row.int("copyKind")).to_owned(),
            DeviceKind::Fill => "Memset (Device)".to_owned(),
            DeviceKind::Graph => "CUDA graph".to_owned(),
        };
        let small = |column: &str| row.int(column).and_then(|n| u32::try_from(n).ok());
        let (device, stream) = (small("deviceId"), small("streamId"));
        let (correlation, bytes) = (small("correlationId"), row.int("bytes"));
        let trace = self.trace(process);
        let name = trace.names.id(&name);
        trace.device.push(DeviceEvent {
            start,
            end,
            name,
            kind,
            device: device.unwrap_or(0),
            stream: stream.unwrap_or(0),
            correlation,
            external: None,
            bytes: bytes
                .and_then(|n| u64::try_from(n).ok())
                .filter(|n| *n <= limits::BYTES)
                .unwrap_or(0),
            collective: None,
        });
    }

    fn launch(&mut self, row: &Row<'_>) {
        let Some((start, end)) = self.span(row) else {
            return;
        };
        let Some((owner, correlation)) = row.owner("globalTid").zip(row.int("correlationId"))
        else {
            return;
        };
        // Names end with the version of the API: `cudaLaunchKernel_v7000`.
        let name = self.string(row, &["nameId"]);
        let name = name.split("_v").next().unwrap_or(&name).to_owned();
        let thread = self.thread(owner);
        let trace = self.trace(owner.0);
        let name = trace.names.id(&name);
        trace.launches.push(Launch {
            start,
            end,
            thread,
            correlation: correlation as u32,
            name,
        });
    }

    fn range(&mut self, row: &Row<'_>) {
        if !row.int("eventType").is_some_and(|t| RANGES.contains(&t)) {
            return;
        }
        let (Some((start, end)), Some(owner)) = (self.span(row), row.owner("globalTid")) else {
            return;
        };
        let own = row.get("text").and_then(Value::text).map(str::to_owned);
        let text = own.unwrap_or_else(|| self.string(row, &["textId"]));
        // `emit_nvtx` adds numbers to the names of operators: `aten::mm, seq = 12, op_id = 3`.
        let numbers = [", seq = ", ", op_id = ", ", sizes = "];
        let cut = numbers.iter().filter_map(|n| text.find(n)).min();
        let (name, rest) = text.split_at(cut.unwrap_or(text.len()));
        let number = |key: &str| -> Option<u32> {
            let at = rest.find(key)? + key.len();
            let digits = rest[at..].trim_start_matches([' ', '=']);
            let end = digits
                .find(|c: char| !c.is_ascii_digit())
                .unwrap_or(digits.len());
            digits[..end].parse().ok()
        };
        let operator = name.contains("::") && !name.starts_with("FSDP::");
        let backward = name.contains("autograd::") || name.contains("Backward");
        let thread = self.thread(owner);
        let trace = self.trace(owner.0);
        let id = trace.names.id(name);
        trace.host.push(HostEvent {
            start,
            end,
            name: id,
            thread,
            is_annotation: !operator,
            external: None,
            sequence: number("seq"),
            // Any number other than 0 means that autograd runs the operator.
            forward_thread: u32::from(backward),
            inputs: None,
        });
    }

    fn finish(self, bytes: u64) -> Vec<Trace> {
        let incomplete = self.incomplete;
        let devices: Vec<String> = self.devices.into_values().collect();
        let with_work = self
            .processes
            .into_values()
            .filter(|t| !t.device.is_empty());
        let mut all: Vec<Trace> = with_work.collect();
        let world = u32::try_from(all.len()).unwrap_or(u32::MAX);
        for (rank, trace) in all.iter_mut().enumerate() {
            trace.head.recorder = Recorder::Nsight;
            let first = trace.device.first().map_or(0, |d| d.device as usize);
            let own = devices.get(first).or(devices.first());
            trace.head.devices = own.cloned().into_iter().collect();
            if world > 1 {
                trace.head.rank = u32::try_from(rank).ok();
                trace.head.world_size = Some(world);
            }
            trace.bytes = bytes / u64::from(world);
            trace.events = (trace.device.len() + trace.launches.len() + trace.host.len()) as u64;
            trace.notes.push(
                "export of Nsight Systems: units and phases are not verified with exports of real jobs"
                    .into(),
            );
            trace.notes.extend(graphs(trace));
            if rank == 0 && incomplete > 0 {
                trace
                    .notes
                    .push(format!("{incomplete} rows have no valid start or end"));
            }
        }
        all.iter_mut().for_each(kineto::keep_plausible);
        all.retain(|t| !t.device.is_empty());
        all.into_iter().map(kineto::sorted).collect()
    }
}

/// Says that the kernels of CUDA graphs are not in a trace, and how to record them.
fn graphs(trace: &Trace) -> Option<String> {
    let all = trace.device.iter().filter(|e| e.kind == DeviceKind::Graph);
    let (count, time) = all.fold((0, 0), |(n, t), e| (n + 1, t + (e.end - e.start).max(0)));
    (count > 0).then(|| {
        let what = match count {
            1 => "1 launch of a CUDA graph".to_owned(),
            n => format!("{n} launches of CUDA graphs"),
        };
        let verb = if count == 1 { "is" } else { "are" };
        format!(
            "{what} ({:.2} ms) {verb} traced as a whole, so kernels and collectives within are not in the export; `nsys profile --cuda-graph-trace=node` records them",
            time as f64 / 1e6
        )
    })
}

/// Calls a function for each row of a table, if the export has it.
fn each(database: &mut Database, name: &str, row: &mut dyn FnMut(&Row<'_>)) -> io::Result<()> {
    let Some(table) = database.table(name) else {
        return Ok(());
    };
    database.scan(&table, &mut |values| {
        row(&Row {
            table: &table,
            values,
        });
    })
}

/// Returns the name of a copy as PyTorch's profiler gives it.
fn copy(kind: Option<i64>) -> &'static str {
    match kind {
        Some(1) => "Memcpy HtoD",
        Some(2) => "Memcpy DtoH",
        Some(8) => "Memcpy DtoD",
        Some(10) => "Memcpy PtoP",
        _ => "Memcpy",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attribute::attribute;

    const PROCESS: i64 = 7 << 24;

    /// A kernel of backward of 10 ns, a CUDA graph of 900 ns, and a kernel of the optimizer of
    /// 100 ns, with their launches. Columns are those of the exporter's schema.
    fn export() -> Export {
        let mut export = Export::default();
        for (id, text) in [
            (1, "cudaGraphLaunch_v10000"),
            (2, "multi_tensor_apply_kernel<FusedAdam>"),
            (3, "cunn_SoftMaxBackward"),
        ] {
            export.strings.insert(id, text.to_owned());
        }
        let row = |export: &mut Export, last: &str, values: [i64; 5], kind| {
            let columns = [
                "start",
                "end",
                "streamId",
                "correlationId",
                last,
                "globalPid",
            ];
            let values = values.into_iter().chain([PROCESS]).map(Value::Int);
            let (table, values) = (Table::of(&columns), values.collect::<Vec<_>>());
            export.device(
                &Row {
                    table: &table,
                    values: &values,
                },
                kind,
            );
        };
        let kernel = "demangledName";
        row(&mut export, kernel, [90, 100, 7, 4, 3], DeviceKind::Kernel);
        row(
            &mut export,
            "graphId",
            [100, 1000, 7, 5, 1],
            DeviceKind::Graph,
        );
        row(
            &mut export,
            kernel,
            [1000, 1100, 7, 6, 2],
            DeviceKind::Kernel,
        );
        let launches = Table::of(&["start", "end", "correlationId", "nameId", "globalTid"]);
        for [start, correlation] in [[10, 4], [20, 5], [40, 6]] {
            let values = [start, start + 10, correlation, 1, PROCESS + 1].map(Value::Int);
            export.launch(&Row {
                table: &launches,
                values: &values,
            });
        }
        export
    }

    #[test]
    fn a_graph_as_a_whole_is_device_work_of_unknown_kind() {
        let traces = export().finish(0);
        let trace = &traces[0];
        let graph = &trace.device[1];
        assert_eq!(graph.kind, DeviceKind::Graph);
        assert_eq!((graph.start, graph.end, graph.stream), (100, 1000, 7));
        let note = trace.notes.join("\n");
        assert!(
            note.contains("1 launch of a CUDA graph (0.00 ms) is"),
            "{note}"
        );
        assert!(note.contains("--cuda-graph-trace=node"), "{note}");
        let a = attribute(trace);
        assert_eq!(a.work.len(), 3, "the graph is on its stream");
        assert_eq!(a.time, (110, 1010));
        assert_eq!(a.unmatched["CUDA graph"], (1, 900));
    }
}
