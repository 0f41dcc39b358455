//! Timelines for Perfetto and `chrome://tracing`.
//!
//! A trace has one process per rank (rank 0, and a straggler if one is simulated), one thread per
//! stream, and one thread for the host. Counters show allocated and reserved memory. An arrow
//! connects every collective with the first work that waited for it. Events are streamed to the
//! writer, so memory does not grow with the run.
//!
//! Time 0 is the start of the recorded step, as in `explain`, reports and the dashboard. The host
//! may issue a step while the device still runs the previous one. Viewers move the first event of a
//! file to time 0 and drop events before 0. Launches before the step are therefore left out; their
//! slices on streams contain the launch time instead (`issued_us`, negative in that case).

mod flows;
mod json;

use crate::analysis::spans::{self, Work};
use flows::Flow;
use json::Writer;
use shardlab_plan::Program;
use shardlab_plan::ir::InstrId;
use shardlab_plan::program::Op;
use shardlab_plan::record::{Blocker, Run, Span};
use shardlab_plan::units::Picos;
use std::io::{self, Write};

/// Thread of the host; stream `s` is thread `s + 1`.
const HOST: u32 = 0;

/// Spans of a rank. Each rank is a process of the trace.
#[derive(Clone, Copy)]
struct Ranked<'a> {
    rank: u32,
    spans: &'a [Span],
}

/// Writes the recorded step of a run.
///
/// # Errors
/// Fails if the writer fails.
pub fn write(program: &Program, run: &Run, writer: impl Write) -> io::Result<()> {
    let mut trace = Trace {
        program,
        run,
        arrows: 0,
        json: Writer::new(writer)?,
    };
    let first = Ranked {
        rank: 0,
        spans: &run.spans,
    };
    trace.step(first)?;
    trace.memory(first)?;
    if let Some(other) = &run.other {
        trace.step(Ranked {
            rank: other.rank,
            spans: &other.spans,
        })?;
    }
    trace.json.finish(&[
        ("scenario", &run.scenario),
        ("program_digest", &run.program_digest),
        ("hardware", &run.hardware),
        ("policy", &run.policy),
    ])
}

struct Trace<'a, W: Write> {
    program: &'a Program,
    run: &'a Run,
    /// Number of arrows so far. Their ids are unique per file, not per rank.
    arrows: u64,
    json: Writer<W>,
}

impl<W: Write> Trace<'_, W> {
    /// Returns microseconds since the start of the step, at least 0.
    fn us(&self, time: Picos) -> f64 {
        time.saturating_sub(self.run.recorded_from).us()
    }

    /// Returns microseconds since the start of the step; negative before it.
    fn signed_us(&self, time: Picos) -> f64 {
        self.us(time) - self.run.recorded_from.saturating_sub(time).us()
    }

    /// Writes all events of a rank except its memory counters.
    fn step(&mut self, of: Ranked<'_>) -> io::Result<()> {
        self.names(of)?;
        self.host(of)?;
        self.streams(of)?;
        self.arrows(of)
    }

    fn names(&mut self, of: Ranked<'_>) -> io::Result<()> {
        let others = match self
            .run
            .environment
            .get("simulated_ranks")
            .map(String::as_str)
        {
            Some("1") if self.run.world_size > 1 => {
                format!("rank 0 of {}, all alike", self.run.world_size)
            }
            _ => format!("rank {} of {}", of.rank, self.run.world_size),
        };
        self.json.metadata(
            "process_name",
            of.rank,
            None,
            "name",
            &format!("\"{others}\""),
        )?;
        let thread = |json: &mut Writer<W>, tid: u32, name: &str| {
            json.metadata(
                "thread_name",
                of.rank,
                Some(tid),
                "name",
                &format!("\"{name}\""),
            )?;
            json.metadata(
                "thread_sort_index",
                of.rank,
                Some(tid),
                "sort_index",
                &tid.to_string(),
            )
        };
        thread(&mut self.json, HOST, "host")?;
        for (i, stream) in self.program.streams.iter().enumerate() {
            thread(&mut self.json, i as u32 + 1, stream.kind.name())?;
        }
        Ok(())
    }

    /// Writes one slice per launch since the start of the step, from the previous launch to this
    /// one.
    fn host(&mut self, of: Ranked<'_>) -> io::Result<()> {
        let mut order: Vec<&Span> = of.spans.iter().collect();
        order.sort_by_key(|s| (s.issued, s.instr));
        let mut before: Option<&Span> = None;
        for span in order {
            if span.issued < self.run.recorded_from {
                before = Some(span);
                continue;
            }
            let start = before.map_or(span.issued, |b| b.issued);
            let work = self.host_work(before.map(|b| b.instr), span.instr);
            let (from, to) = (self.us(start), self.us(span.issued));
            let name = spans::name(self.program, span.instr);
            let unit = spans::unit(self.program, span);
            self.json.slice(
                HOST,
                of.rank,
                "host",
                &format!("launch {name} {unit}"),
                from,
                to - from,
            )?;
            self.json.number("instr", f64::from(span.instr.0))?;
            if !work.is_empty() {
                self.json.string("host_work", &work)?;
            }
            self.json.end()?;
            before = Some(span);
        }
        Ok(())
    }

    /// Describes the work of the host between two launches.
    fn host_work(&self, after: Option<InstrId>, before: InstrId) -> String {
        let first = after.map_or(before.0, |i| i.0 + 1);
        let mut parts = Vec::new();
        for i in first..before.0 {
            match self.program.instrs[i as usize].op {
                Op::HostWork { kind, count } => parts.push(format!("{kind:?} x{count}")),
                Op::HostWait(event) => parts.push(format!("wait for e{}", event.0)),
                _ => {}
            }
        }
        parts.join(", ").to_lowercase()
    }

    fn streams(&mut self, of: Ranked<'_>) -> io::Result<()> {
        for span in of.spans {
            let instr = &self.program.instrs[span.instr.index()];
            let unit = spans::unit(self.program, span);
            let name = spans::name(self.program, span.instr);
            let category = Work::of(self.program, span.instr).map_or("other", Work::name);
            let (from, to) = (self.us(span.start), self.us(span.end));
            let issued = self.signed_us(span.issued);
            let tid = u32::from(span.stream.0) + 1;
            self.json.slice(
                tid,
                of.rank,
                category,
                &format!("{name} {unit}"),
                from,
                to - from,
            )?;
            let json = &mut self.json;
            json.number("instr", f64::from(span.instr.0))?;
            json.string("unit", unit)?;
            json.string("phase", instr.phase.name())?;
            json.number("micro_batch", f64::from(instr.micro_batch))?;
            json.string("rule", instr.rule.name())?;
            json.string("why", instr.rule.why())?;
            json.number("bytes", spans::bytes(self.program, span.instr) as f64)?;
            if let Op::Launch { kernel, .. } = instr.op {
                let flops = self.program.kernels[kernel.index()].flops;
                json.number("flops", flops.0 as f64)?;
            }
            json.number("issued_us", issued)?;
            json.number("alone_us", span.alone.us())?;
            json.string("waited_for", &blocker(self.program, of.spans, span.blocker))?;
            json.end()?;
        }
        Ok(())
    }

    /// Writes the memory counters. Allocators act when the host issues work, not when the device
    /// runs it; the name of the counter says so. Of the samples before the step, the highest and
    /// the last are kept, so that no peak is lost.
    fn memory(&mut self, of: Ranked<'_>) -> io::Result<()> {
        let timeline = &self.run.memory.timeline;
        let began = timeline.partition_point(|s| s.time < self.run.recorded_from);
        let (before, within) = timeline.split_at(began);
        let highest = before.iter().max_by_key(|s| s.allocated);
        let mut last = None;
        for sample in highest.into_iter().chain(before.last()).chain(within) {
            let now = (sample.allocated, sample.reserved);
            if last.replace(now) == Some(now) {
                continue;
            }
            let at = self.us(sample.time);
            self.json.counter(of.rank, "memory MiB, as issued", at)?;
            self.json.number("allocated", sample.allocated.mib())?;
            self.json.number("reserved", sample.reserved.mib())?;
            self.json.end()?;
        }
        Ok(())
    }

    fn arrows(&mut self, of: Ranked<'_>) -> io::Result<()> {
        for Flow { from, to } in flows::flows(self.program, of.spans) {
            let (a, b) = (&of.spans[from], &of.spans[to]);
            // The arrow starts inside the collective's slice and ends at the start of the
            // consumer's.
            let (leaves, arrives) = (self.us(a.end), self.us(b.start));
            let inside = leaves.min(self.us(a.start).max(leaves - 0.001));
            let threads = [a, b].map(|s| u32::from(s.stream.0) + 1);
            let id = self.arrows;
            self.arrows += 1;
            let name = spans::name(self.program, a.instr);
            self.json.flow("s", id, name, threads[0], of.rank, inside)?;
            self.json
                .flow("f", id, name, threads[1], of.rank, arrives.max(inside))?;
        }
        Ok(())
    }
}

fn blocker(program: &Program, spans: &[Span], blocker: Blocker) -> String {
    let span = |i: u32| {
        let span = &spans[i as usize];
        format!(
            "{} {}",
            spans::name(program, span.instr),
            spans::unit(program, span)
        )
    };
    match blocker {
        Blocker::Host => "host".into(),
        Blocker::Stream(i) => format!("stream: {}", span(i)),
        Blocker::Event(i) => format!("event: {}", span(i)),
        Blocker::Communicator(i) => format!("communicator: {}", span(i)),
        Blocker::Rank => "another rank".into(),
        Blocker::Sms => "free SMs".into(),
        Blocker::None => "nothing".into(),
    }
}
