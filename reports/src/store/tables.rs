//! The large parts of a run as CSV: spans, memory samples and gaps.
//!
//! Each row describes its instruction in full (kernel, kind of work, unit, phase, …), so that a
//! table can be read without other files. The numbers of unit and stream make exact reading
//! possible.

use crate::view::{InstrView, Names, RunView, Work};
use csv::{ByteRecord, Writer};
use shardlab_plan::ir::{InstrId, Role, StreamId, UnitId};
use shardlab_plan::program::Phase;
use shardlab_plan::record::{Blocker, Cause, ExposedGap, MemorySample, Span};
use shardlab_plan::units::{Bytes, Picos};
use std::io::{self, Write};

/// Columns that describe an instruction, in every table.
const INSTR: [&str; 12] = [
    "instr",
    "name",
    "work",
    "role",
    "unit",
    "unit_name",
    "phase",
    "micro_batch",
    "stream",
    "stream_name",
    "rule",
    "bytes",
];
const SPAN: [&str; 8] = [
    "flops",
    "issued_ps",
    "ready_ps",
    "start_ps",
    "end_ps",
    "alone_ps",
    "blocker",
    "blocked_by",
];
const SAMPLE: [&str; 3] = ["time_ps", "allocated", "reserved"];
const GAP: [&str; 4] = ["start_ps", "end_ps", "cause", "waited_for"];

/// Writes rows of numbers and words.
struct Rows<W: Write> {
    csv: Writer<W>,
    number: itoa::Buffer,
}

impl<W: Write> Rows<W> {
    fn new<'a>(to: W, titles: impl Iterator<Item = &'a str>) -> Result<Self, csv::Error> {
        let mut csv = Writer::from_writer(to);
        csv.write_record(titles)?;
        Ok(Self {
            csv,
            number: itoa::Buffer::new(),
        })
    }

    fn text(&mut self, text: &str) -> Result<(), csv::Error> {
        self.csv.write_field(text)
    }

    fn number(&mut self, n: u64) -> Result<(), csv::Error> {
        self.csv.write_field(self.number.format(n))
    }

    fn end(&mut self) -> Result<(), csv::Error> {
        self.csv.write_record(None::<&[u8]>)
    }

    fn instr(&mut self, view: &RunView, id: InstrId) -> Result<(), csv::Error> {
        self.number(id.0.into())?;
        let Some(instr) = view.instr(id) else {
            return INSTR[1..].iter().try_for_each(|_| self.text(""));
        };
        self.text(view.name_of(instr))?;
        self.text(instr.work.map_or("", Work::name))?;
        self.text(instr.role.map_or("", Role::name))?;
        self.number(instr.unit.0.into())?;
        self.text(view.unit(instr.unit))?;
        self.text(instr.phase.name())?;
        self.number(instr.micro_batch.into())?;
        self.number(instr.stream.0.into())?;
        let stream = view.program.streams.get(instr.stream.index());
        self.text(stream.map_or("", |s| s))?;
        self.text(view.rule_of(instr))?;
        self.number(instr.bytes)
    }

    fn finish(mut self) -> io::Result<()> {
        self.csv.flush()
    }
}

pub(super) fn write_spans(view: &RunView, to: impl Write) -> Result<(), csv::Error> {
    let mut rows = Rows::new(to, INSTR.into_iter().chain(SPAN))?;
    for span in &view.run.spans {
        rows.instr(view, span.instr)?;
        rows.number(view.instr(span.instr).map_or(0, |i| i.flops))?;
        for time in [span.issued, span.ready, span.start, span.end, span.alone] {
            rows.number(time.0)?;
        }
        let (word, of) = match span.blocker {
            Blocker::Host => ("host", None),
            Blocker::Stream(i) => ("stream", Some(i)),
            Blocker::Event(i) => ("event", Some(i)),
            Blocker::Communicator(i) => ("communicator", Some(i)),
            Blocker::Rank => ("rank", None),
            Blocker::Sms => ("sms", None),
            Blocker::None => ("none", None),
        };
        rows.text(word)?;
        match of {
            Some(i) => rows.number(i.into())?,
            None => rows.text("")?,
        }
        rows.end()?;
    }
    Ok(rows.finish()?)
}

pub(super) fn write_memory(view: &RunView, to: impl Write) -> Result<(), csv::Error> {
    let mut rows = Rows::new(to, INSTR.into_iter().chain(SAMPLE))?;
    for sample in &view.run.memory.timeline {
        rows.instr(view, sample.instr)?;
        for n in [sample.time.0, sample.allocated.0, sample.reserved.0] {
            rows.number(n)?;
        }
        rows.end()?;
    }
    Ok(rows.finish()?)
}

pub(super) fn write_gaps(view: &RunView, to: impl Write) -> Result<(), csv::Error> {
    let mut rows = Rows::new(to, GAP.into_iter())?;
    for gap in &view.run.gaps {
        rows.number(gap.start.0)?;
        rows.number(gap.end.0)?;
        rows.text(gap.cause.name())?;
        match gap.waited_for {
            Some(i) => rows.number(i.into())?,
            None => rows.text("")?,
        }
        rows.end()?;
    }
    Ok(rows.finish()?)
}

/// Reads rows with the expected titles. Later versions may append columns.
struct Reader<'a> {
    csv: csv::Reader<&'a [u8]>,
    record: ByteRecord,
    titles: Vec<&'static str>,
    /// Column of the next field.
    at: usize,
    row: u64,
}

impl<'a> Reader<'a> {
    fn new(text: &'a [u8], titles: impl Iterator<Item = &'static str>) -> Result<Self, String> {
        let mut csv = csv::Reader::from_reader(text);
        let titles: Vec<&str> = titles.collect();
        let found = csv.byte_headers().map_err(|e| e.to_string())?;
        if !titles
            .iter()
            .enumerate()
            .all(|(i, t)| found.get(i) == Some(t.as_bytes()))
        {
            return Err(format!("the columns {} are expected", titles.join(",")));
        }
        Ok(Self {
            csv,
            record: ByteRecord::new(),
            titles,
            at: 0,
            row: 0,
        })
    }

    fn next(&mut self) -> Result<bool, String> {
        self.at = 0;
        self.row += 1;
        self.csv
            .read_byte_record(&mut self.record)
            .map_err(|e| e.to_string())
    }

    fn field(&mut self) -> &[u8] {
        let at = self.at;
        self.at += 1;
        self.record.get(at).unwrap_or_default()
    }

    /// Describes an error in the field that was read last.
    fn fault(&self) -> String {
        let at = self.at.saturating_sub(1);
        let found = String::from_utf8_lossy(self.record.get(at).unwrap_or_default());
        let title = self.titles.get(at).copied().unwrap_or_default();
        format!(
            "row {}: `{found}` is not a valid value for `{title}`",
            self.row
        )
    }

    fn number<T: TryFrom<u64>>(&mut self) -> Result<T, String> {
        let n = parse(self.field()).and_then(|n| T::try_from(n).ok());
        n.ok_or_else(|| self.fault())
    }

    fn optional<T: TryFrom<u64>>(&mut self) -> Result<Option<T>, String> {
        if self.record.get(self.at).is_none_or(<[u8]>::is_empty) {
            self.at += 1;
            return Ok(None);
        }
        self.number().map(Some)
    }

    fn picos(&mut self) -> Result<Picos, String> {
        self.number().map(Picos)
    }

    fn name(&mut self, names: &mut Names) -> Result<u32, String> {
        match std::str::from_utf8(self.field()) {
            Ok(text) => Ok(names.index(text)),
            Err(_) => Err(self.fault()),
        }
    }

    /// Returns the value that the field stands for; `None` if it is empty.
    fn one_of<T: Copy>(
        &mut self,
        all: &[T],
        name: impl Fn(T) -> &'static str,
    ) -> Result<Option<T>, String> {
        let field = self.field();
        if field.is_empty() {
            return Ok(None);
        }
        match all.iter().find(|x| name(**x).as_bytes() == field) {
            Some(x) => Ok(Some(*x)),
            None => Err(self.fault()),
        }
    }

    /// Reads the instruction of a row; `None` if only its number is known.
    fn instr(&mut self, names: &mut Names) -> Result<(InstrId, Option<InstrView>), String> {
        let id = InstrId(self.number()?);
        if self.record.get(6).is_none_or(<[u8]>::is_empty) {
            self.at = INSTR.len();
            return Ok((id, None));
        }
        let name = self.name(names)?;
        let work = self.one_of(&Work::ALL, Work::name)?;
        let role = self.one_of(&Role::ALL, Role::name)?;
        let unit = UnitId(self.number()?);
        self.field();
        let phase = self.one_of(&PHASES, Phase::name)?;
        let micro_batch = self.number()?;
        let stream = StreamId(self.number()?);
        self.field();
        let rule = self.name(names)?;
        let instr = InstrView {
            id,
            name,
            rule,
            work,
            role,
            unit,
            phase: phase.ok_or_else(|| self.fault())?,
            micro_batch,
            stream,
            bytes: self.number()?,
            flops: 0,
        };
        Ok((id, Some(instr)))
    }
}

const PHASES: [Phase; 10] = [
    Phase::Forward,
    Phase::Backward,
    Phase::Recompute,
    Phase::Optimizer,
    Phase::Init,
    Phase::Start,
    Phase::Final,
    Phase::Clip,
    Phase::Refresh,
    Phase::Validation,
];

/// Parses a number in decimal digits.
fn parse(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0u64, |n, c| {
        let digit = c.is_ascii_digit().then(|| u64::from(c - b'0'))?;
        n.checked_mul(10)?.checked_add(digit)
    })
}

pub(super) fn read_spans(
    text: &[u8],
    names: &mut Names,
    instrs: &mut Vec<InstrView>,
) -> Result<Vec<Span>, String> {
    let mut rows = Reader::new(text, INSTR.into_iter().chain(SPAN))?;
    let mut all = Vec::with_capacity(text.len() / 160);
    let mut last = None;
    while rows.next()? {
        let (id, instr) = rows.instr(names)?;
        let flops = rows.number()?;
        let stream = instr.map_or(StreamId(0), |i| i.stream);
        instrs.extend(instr.map(|i| InstrView { flops, ..i }));
        let [issued, ready, start, end, alone] = [
            rows.picos()?,
            rows.picos()?,
            rows.picos()?,
            rows.picos()?,
            rows.picos()?,
        ];
        let word = rows.field().to_vec();
        let of: Option<u32> = rows.optional()?;
        last = last.max(of);
        let blocker = match (word.as_slice(), of) {
            (b"host", None) => Blocker::Host,
            (b"stream", Some(i)) => Blocker::Stream(i),
            (b"event", Some(i)) => Blocker::Event(i),
            (b"communicator", Some(i)) => Blocker::Communicator(i),
            (b"rank", None) => Blocker::Rank,
            (b"sms", None) => Blocker::Sms,
            (b"none", None) => Blocker::None,
            _ => return Err(rows.fault()),
        };
        all.push(Span {
            instr: id,
            stream,
            issued,
            ready,
            start,
            end,
            alone,
            blocker,
        });
    }
    match last {
        Some(i) if i as usize >= all.len() => Err(format!(
            "span {i} is waited for, but there are {}",
            all.len()
        )),
        _ => Ok(all),
    }
}

pub(super) fn read_memory(
    text: &[u8],
    names: &mut Names,
    instrs: &mut Vec<InstrView>,
) -> Result<Vec<MemorySample>, String> {
    let mut rows = Reader::new(text, INSTR.into_iter().chain(SAMPLE))?;
    let mut all = Vec::with_capacity(text.len() / 120);
    while rows.next()? {
        let (id, instr) = rows.instr(names)?;
        instrs.extend(instr);
        all.push(MemorySample {
            instr: id,
            time: rows.picos()?,
            allocated: Bytes(rows.number()?),
            reserved: Bytes(rows.number()?),
        });
    }
    Ok(all)
}

pub(super) fn read_gaps(text: &[u8]) -> Result<Vec<ExposedGap>, String> {
    let mut rows = Reader::new(text, GAP.into_iter())?;
    let mut all = Vec::new();
    while rows.next()? {
        all.push(ExposedGap {
            start: rows.picos()?,
            end: rows.picos()?,
            cause: rows
                .one_of(&Cause::ALL, Cause::name)?
                .ok_or_else(|| rows.fault())?,
            waited_for: rows.optional()?,
        });
    }
    Ok(all)
}
