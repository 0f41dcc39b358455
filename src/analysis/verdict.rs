//! The verdict on a prediction: whether the job fits, how long a step takes, and what limits it.

use super::basis::step_time;
use super::phrases::frees;
use super::why;
use crate::predict::{Fit, Prediction};
use serde_json::{Value, json};
use shardlab_plan::record::Basis;
use shardlab_plan::units::{ByteUnit, Bytes};

/// Share of the device's memory that should stay free. A smaller share is too little headroom.
pub const HEADROOM: f64 = 0.05;

const NARROWLY: &str = "fits narrowly";

/// The verdict in two lines: the answer, and the reason. The caller decides what to suggest next.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Short form for tables: `yes`, `tight`, `no` or `?`.
    pub fits: &'static str,
    /// Whether the answer is positive.
    pub good: bool,
    /// The first words: `fits`, `fits narrowly`, `tight`, `does not fit`, `may fit`.
    pub headline: &'static str,
    /// The other parts of the verdict.
    pub parts: Vec<String>,
    /// What limits the step, or what takes up the memory.
    pub why: String,
    /// Step time, milliseconds.
    pub step_ms: f64,
    /// Device memory that stays free; negative if the device has too little.
    pub free_bytes: Option<i64>,
    /// The basis of the numbers, if known.
    pub basis: Option<Basis>,
}

impl Verdict {
    /// Returns the verdict on a prediction made with its spans.
    #[must_use]
    pub fn of(p: &Prediction) -> Self {
        let basis = p.run.basis.as_ref();
        let room = Room::of(p);
        let headline = match &p.fit {
            Fit::Fits if is_narrow(p) => NARROWLY,
            Fit::Fits => "fits",
            Fit::Tight { .. } => "tight",
            Fit::Exceeds { .. } => "does not fit",
            Fit::Unknown => "may fit",
        };
        Self {
            fits: p.fit.word(),
            good: matches!(p.fit, Fit::Fits),
            headline,
            parts: parts(p, basis, room),
            why: match p.fit {
                Fit::Exceeds { .. } => why::shortage(p),
                _ => why::bound(p),
            },
            step_ms: p.step_ms(),
            free_bytes: p.free_bytes(),
            basis: basis.cloned(),
        }
    }

    /// Returns whether the job fits, but with little headroom.
    #[must_use]
    pub fn is_narrow(&self) -> bool {
        self.headline == NARROWLY
    }

    /// Returns the verdict as one line.
    #[must_use]
    pub fn line(&self) -> String {
        let parts = self.parts.iter().map(String::as_str);
        let all: Vec<&str> = std::iter::once(self.headline).chain(parts).collect();
        all.join(" · ")
    }

    /// Returns the verdict as a JSON object, with what to do next.
    #[must_use]
    pub fn json(&self, next: &str) -> Value {
        json!({
            "fits": self.fits,
            "text": self.line(),
            "why": self.why,
            "next": next,
            "step_ms": self.step_ms,
            "free_bytes": self.free_bytes,
        })
    }
}

/// Returns whether a prediction leaves less memory free than it should, or than it may be off by.
pub(crate) fn is_narrow(p: &Prediction) -> bool {
    Room::of(p).is_some_and(Room::is_little)
}

fn parts(p: &Prediction, basis: Option<&Basis>, room: Option<Room>) -> Vec<String> {
    let step = step_time(p.step_ms(), basis);
    let m = &p.run.memory;
    if let (Fit::Exceeds { .. }, Some(capacity)) = (&p.fit, m.capacity) {
        return vec![
            format!("needs {}, the device has {capacity}", m.peak_device),
            format!("{step} with enough memory{}", in_brackets(basis)),
        ];
    }
    let mut parts = vec![format!("{step}{}", in_brackets(basis))];
    match room {
        Some(room) => {
            let of = of_capacity(m.peak_reserved, room.capacity);
            parts.push(format!("{of} reserved, {}", room.words()));
        }
        None => parts.push(format!(
            "{} reserved; the profile does not say how much memory the device has",
            m.peak_reserved
        )),
    }
    if let Fit::Tight { retries, .. } = &p.fit {
        parts.push(format!(
            "the allocator frees cached blocks {}",
            frees(p, *retries)
        ));
    }
    parts
}

fn in_brackets(basis: Option<&Basis>) -> String {
    basis.map_or_else(String::new, |basis| format!(" ({})", basis.words()))
}

/// Formats bytes of a capacity: `42.96 of 140.40 GiB`, `7.3 MiB of 23.54 GiB`.
fn of_capacity(bytes: Bytes, capacity: Bytes) -> String {
    let unit = ByteUnit::of(capacity);
    if ByteUnit::of(bytes) == unit {
        format!("{} of {capacity}", unit.show(bytes))
    } else {
        format!("{bytes} of {capacity}")
    }
}

/// Formats free memory. Uses GiB down to 0.01 GiB, so that it is comparable with the device's
/// capacity.
#[must_use]
pub(crate) fn free_memory(bytes: Bytes) -> String {
    let gib = ByteUnit::Gib;
    if gib.count(bytes) < 0.01 {
        return bytes.to_string();
    }
    format!("{} {}", gib.show(bytes), gib.name())
}

/// Memory that a run leaves free on its device.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Room {
    free: Bytes,
    capacity: Bytes,
    /// Relative error of the predicted peak, if known.
    error: Option<f64>,
}

impl Room {
    fn of(p: &Prediction) -> Option<Self> {
        let percent = p.run.basis.as_ref().and_then(Basis::reserved_percent);
        Some(Self {
            free: Bytes(u64::try_from(p.free_bytes()?).unwrap_or(0)),
            capacity: p.run.memory.capacity?,
            error: percent.map(|percent| percent / 100.0),
        })
    }

    fn share(self) -> f64 {
        self.free.0 as f64 / self.capacity.0.max(1) as f64
    }

    fn is_little(self) -> bool {
        self.share() < HEADROOM.max(self.error.unwrap_or(0.0))
    }

    fn words(self) -> String {
        let share = self.share();
        if self.free.0 == 0 {
            return "nothing free".to_owned();
        }
        if !self.is_little() {
            return format!("{} free", free_memory(self.free));
        }
        let error = match self.error {
            Some(error) if share < error => ", less than the error of this prediction",
            _ => "",
        };
        format!(
            "{} ({:.1} %) free{error}",
            free_memory(self.free),
            100.0 * share
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::predict::{Profiles, predict};
    use shardlab_plan::record::{BasisKind, ErrorBand};
    use shardlab_plan::scenario;
    use std::path::Path;

    fn prediction(name: &str, set: &[&str]) -> Prediction {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let scenario = scenario::load(Path::new(name), &set).unwrap();
        let options = shardlab_sim::Options::default();
        predict(&scenario, &Profiles::default(), &options).unwrap()
    }

    #[test]
    fn the_line_has_the_basis_the_band_and_the_room() {
        let mut p = prediction("small-fsdp2", &[]);
        p.run.step_samples = vec![shardlab_plan::units::Picos::from_us(1_052_246.0)];
        (p.run.memory.capacity, p.fit) = (Some(Bytes(140 << 30)), Fit::Fits);
        p.run.memory.peak_reserved = Bytes(43 << 30);
        p.run.memory.peak_device = Bytes(45 << 30);
        let mut basis = Basis {
            kind: BasisKind::Measured,
            on: "4 x H200".to_owned(),
            band: Some(ErrorBand {
                step_percent: Some(2.0),
                reserved_percent: None,
                rows: 9,
                projects: 2,
                like: "same hardware".to_owned(),
            }),
        };
        let line = |p: &mut Prediction, basis: &Basis| {
            p.run.basis = Some(basis.clone());
            Verdict::of(p).line()
        };
        assert_eq!(
            line(&mut p, &basis),
            "fits · 1,052 ms ± 2.0 % (measured on 4 x H200) · 43.00 of 140.00 GiB reserved, 95.00 GiB free"
        );
        // A narrow fit shows the free share and the error of the prediction.
        p.run.memory.peak_device = Bytes(138 << 30);
        let text = line(&mut p, &basis);
        assert!(text.starts_with("fits narrowly · "), "{text}");
        assert!(text.ends_with(", 2.00 GiB (1.4 %) free"), "{text}");
        basis.band.as_mut().unwrap().reserved_percent = Some(3.0);
        let text = line(&mut p, &basis);
        let error = "2.00 GiB (1.4 %) free, less than the error of this prediction";
        assert!(text.ends_with(error), "{text}");
        // The usual headroom is not enough if the prediction's error exceeds it.
        p.run.memory.peak_device = Bytes(126 << 30);
        basis.band.as_mut().unwrap().reserved_percent = Some(15.0);
        assert!(line(&mut p, &basis).starts_with("fits narrowly"));
        assert!(Verdict::of(&p).is_narrow() && is_narrow(&p));
        p.fit = Fit::Tight {
            retries: 13,
            needs: p.needs(),
        };
        let tight = Verdict::of(&p);
        assert_eq!((tight.headline, tight.good), ("tight", false));
        assert!(
            tight.line().contains("frees cached blocks 13 times in "),
            "{tight:?}"
        );
        (p.run.memory.capacity, p.fit) = (None, Fit::Unknown);
        let unknown = Verdict::of(&p);
        assert_eq!((unknown.headline, unknown.free_bytes), ("may fit", None));
    }

    #[test]
    fn free_memory_compares_with_the_device() {
        assert_eq!(free_memory(Bytes(1020 << 20)), "1.00 GiB");
        assert_eq!(free_memory(Bytes(24 << 30)), "24.00 GiB");
        assert_eq!(free_memory(Bytes(1 << 20)), "1.0 MiB");
    }

    #[test]
    fn what_does_not_fit_says_what_it_needs() {
        let set = ["mesh.hardware=h100-80", "train.recompute=none"];
        let p = prediction("llama3-8b-4xh200", &set);
        let verdict = Verdict::of(&p);
        let line = verdict.line();
        let needs = format!(
            "does not fit · needs {}, the device has ",
            p.run.memory.peak_device
        );
        assert!(line.starts_with(&needs), "{line}");
        assert!(
            line.contains(" with enough memory (estimated: partly from data sheets)"),
            "{line}"
        );
        assert!(verdict.why.contains("activation"), "{}", verdict.why);
        assert!(verdict.free_bytes.unwrap() < 0);
        let json = verdict.json("shardlab explain x");
        assert_eq!((&json["fits"], &json["text"]), (&"no".into(), &line.into()));
        assert_eq!(json["next"], "shardlab explain x");
    }
}
