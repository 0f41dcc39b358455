//! Writes trace events one at a time.

use std::io::{self, BufWriter, Write};

/// A trace file in progress.
pub(super) struct Writer<W: Write> {
    out: BufWriter<W>,
    first: bool,
    first_arg: bool,
}

/// Converts microseconds to whole nanoseconds, rounded down, which is the precision of readers. A
/// slice that ends where the next one starts still does so after rounding. If it were a nanosecond
/// longer, the slices would overlap, and Perfetto drops overlapping slices
/// (`slice_drop_overlapping_complete_event`).
fn nanos(micros: f64) -> i64 {
    // The conversion uses picoseconds, so that floating-point sums do not fall just below a whole
    // nanosecond.
    ((micros * 1e6).round() as i64).div_euclid(1000)
}

/// Formats nanoseconds as microseconds, exactly.
fn micros(nanos: i64) -> String {
    let (whole, rest) = (nanos / 1000, nanos % 1000);
    format!("{whole}.{rest:03}")
}

/// Formats a JSON string with quotes.
fn quoted(text: &str) -> String {
    // A string always has a JSON form.
    serde_json::Value::from(text).to_string()
}

/// Returns the number if it is finite, or else 0, because JSON has neither NaN nor infinity.
fn number(x: f64) -> f64 {
    if x.is_finite() { x } else { 0.0 }
}

impl<W: Write> Writer<W> {
    pub(super) fn new(writer: W) -> io::Result<Self> {
        let mut out = BufWriter::new(writer);
        out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        Ok(Self {
            out,
            first: true,
            first_arg: true,
        })
    }

    fn separate(&mut self) -> io::Result<()> {
        let separator: &[u8] = if self.first { b"\n" } else { b",\n" };
        self.first = false;
        self.first_arg = true;
        self.out.write_all(separator)
    }

    /// Writes a complete metadata event. `value` is JSON.
    pub(super) fn metadata(
        &mut self,
        name: &str,
        pid: u32,
        tid: Option<u32>,
        key: &str,
        value: &str,
    ) -> io::Result<()> {
        self.separate()?;
        let tid = tid.map(|t| format!("\"tid\":{t},")).unwrap_or_default();
        write!(
            self.out,
            "{{\"ph\":\"M\",\"name\":\"{name}\",\"pid\":{pid},{tid}\"args\":{{\"{key}\":{value}}}}}"
        )
    }

    /// Starts a slice; arguments and [`Self::end`] follow. Times are in microseconds.
    pub(super) fn slice(
        &mut self,
        tid: u32,
        pid: u32,
        category: &str,
        name: &str,
        start: f64,
        length: f64,
    ) -> io::Result<()> {
        self.separate()?;
        let (from, to) = (nanos(start), nanos(start + length.max(0.0)));
        write!(
            self.out,
            "{{\"ph\":\"X\",\"pid\":{pid},\"tid\":{tid},\"ts\":{},\"dur\":{},\"cat\":\"{category}\",\"name\":{},\"args\":{{",
            micros(from),
            micros(to - from),
            quoted(name)
        )
    }

    /// Starts a counter event; its series and [`Self::end`] follow.
    pub(super) fn counter(&mut self, pid: u32, name: &str, at: f64) -> io::Result<()> {
        self.separate()?;
        write!(
            self.out,
            "{{\"ph\":\"C\",\"pid\":{pid},\"ts\":{},\"name\":{},\"args\":{{",
            micros(nanos(at)),
            quoted(name)
        )
    }

    /// Writes a complete flow event: `s` starts an arrow, `f` ends it.
    pub(super) fn flow(
        &mut self,
        ph: &str,
        id: u64,
        name: &str,
        tid: u32,
        pid: u32,
        at: f64,
    ) -> io::Result<()> {
        self.separate()?;
        let bind = if ph == "f" { ",\"bp\":\"e\"" } else { "" };
        write!(
            self.out,
            "{{\"ph\":\"{ph}\",\"cat\":\"flow\",\"id\":{id},\"pid\":{pid},\"tid\":{tid},\"ts\":{},\"name\":{}{bind}}}",
            micros(nanos(at)),
            quoted(name)
        )
    }

    /// Writes a numeric argument of the current event.
    pub(super) fn number(&mut self, key: &str, value: f64) -> io::Result<()> {
        self.argument(key)?;
        write!(self.out, "{}", number(value))
    }

    /// Writes a text argument of the current event.
    pub(super) fn string(&mut self, key: &str, value: &str) -> io::Result<()> {
        self.argument(key)?;
        self.out.write_all(quoted(value).as_bytes())
    }

    fn argument(&mut self, key: &str) -> io::Result<()> {
        let separator = if self.first_arg { "" } else { "," };
        self.first_arg = false;
        write!(self.out, "{separator}\"{key}\":")
    }

    /// Ends the current event.
    pub(super) fn end(&mut self) -> io::Result<()> {
        self.out.write_all(b"}}")
    }

    /// Ends the file with metadata about it.
    pub(super) fn finish(mut self, about: &[(&str, &str)]) -> io::Result<()> {
        self.out.write_all(b"\n],\"otherData\":{")?;
        for (i, (key, value)) in about.iter().enumerate() {
            let separator = if i > 0 { "," } else { "" };
            write!(self.out, "{separator}\"{key}\":{}", quoted(value))?;
        }
        self.out.write_all(b"}}\n")?;
        self.out.flush()
    }
}
