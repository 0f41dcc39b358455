//! Runs one fuzz input: its bytes choose a scenario, which is read, planned, checked and simulated.
//! Errors are valid results; panics, programs that break a rule and simulations that break an
//! invariant are bugs.
//!
//! Shared by the libFuzzer target (`fuzz/`) and the test next to this folder.

use shardlab_plan::check;
use shardlab_plan::config::Scenario;
use shardlab_plan::scenario;
use shardlab_plan::scenario::{Accept, ScenarioError};
use shardlab_sim::{Options, Profile, SimError, simulate_light};
use std::fmt::Write as _;

/// Maximum number of block executions per step for a scenario to be planned. Keeps the time of an
/// input within a few milliseconds.
const BLOCK_RUNS: u64 = 12;

/// The last stage that an input reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reached {
    /// The scenario was rejected.
    Refused,
    /// The scenario is valid, but too large to plan here.
    Large,
    /// Planning failed.
    Unplanned,
    /// Planned and checked, but a task is longer than the simulator can represent, or the profile
    /// is not a shipped one.
    Unpriced,
    /// Planned, checked and simulated.
    Simulated,
}

/// Reads decisions from bytes. Once these run out, all decisions are zero.
struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&b, rest)) => {
                self.0 = rest;
                b
            }
            None => 0,
        }
    }

    fn below(&mut self, n: usize) -> usize {
        usize::from(self.byte()) % n.max(1)
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn take(&mut self, n: usize) -> &'a [u8] {
        let (a, b) = self.0.split_at(n.min(self.0.len()));
        self.0 = b;
        a
    }
}

/// Module patterns that match in some family, and some that never match.
const PATTERNS: &[&str] = &[
    "layers.*",
    "layers.0",
    "layers.1",
    "layers.*.attention",
    "layers.*.mlp",
    "layers.*.feed_forward",
    "h.*",
    "*",
    "**",
    "tok_embeddings",
    "norm+output",
    "norm+output=keep",
    "output",
    "wte+wpe",
    "ln_f",
    "layers.0+layers.1",
    "layers.*=keep",
    "head",
    "?",
    "",
    "+",
    "=keep",
    "layers.[",
];

/// Writes a value of an accepted form, mostly within its limits and mostly small.
fn value(accept: &Accept, c: &mut Choices<'_>, out: &mut String) {
    match *accept {
        Accept::Bool => out.push_str(c.pick(&["true", "false"])),
        Accept::Integer(lo, hi) | Accept::Bytes(lo, hi) | Accept::Size(lo, hi) => {
            let n = match c.byte() % 16 {
                0 => lo,
                1 => hi,
                2 => hi.saturating_add(1),
                3 => lo.wrapping_sub(1),
                4 | 5 => (1 << c.below(40)).clamp(lo, hi),
                6 => ((1 << c.below(40)) - 1).clamp(lo, hi),
                7 => 8 * u64::from(c.byte()),
                _ => lo + u64::from(c.byte() % 9),
            };
            match *accept {
                Accept::Bytes(..) if n % 3 == 1 => write!(out, "\"{}MiB\"", n % 4096),
                Accept::Size(..) => write!(out, "\"{n}B\""),
                _ => write!(out, "{n}"),
            }
            .expect("writing to a string");
        }
        Accept::Number(lo, hi) => {
            let x = match c.byte() % 6 {
                0 => lo,
                1 => hi,
                2 => hi * 2.0,
                3 => lo + (hi - lo) / 2.0,
                4 => -1.0,
                _ => f64::from(c.byte()) / 256.0,
            };
            write!(out, "{x:?}").expect("writing to a string");
        }
        Accept::Choice(words) => {
            write!(out, "\"{}\"", c.pick(words)).expect("writing to a string");
        }
        Accept::Path(_) => out.push_str("\"no-such-profile.toml\""),
        Accept::Text => write!(out, "\"{}\"", c.pick(PATTERNS)).expect("writing to a string"),
        Accept::List(of) | Accept::Short(of, _) => {
            out.push('[');
            for i in 0..c.below(4) {
                out.push_str(if i > 0 { ", " } else { "" });
                value(of, c, out);
            }
            out.push(']');
        }
        Accept::Tuple(of, n) => {
            out.push('[');
            for i in 0..n + usize::from(c.byte() == 255) {
                out.push_str(if i > 0 { ", " } else { "" });
                value(of, c, out);
            }
            out.push(']');
        }
        Accept::Empty => out.push_str("[]"),
        Accept::Table(fields) => {
            out.push('{');
            let chosen = c.byte();
            let mut first = true;
            for (i, (key, of)) in fields.iter().enumerate() {
                if chosen >> (i % 8) & 1 == 1 {
                    out.push_str(if first { " " } else { ", " });
                    first = false;
                    out.push_str(key);
                    out.push_str(" = ");
                    value(of, c, out);
                }
            }
            out.push_str(" }");
        }
        Accept::Map(of) => {
            write!(out, "{{ {:?} = ", c.pick(PATTERNS)).expect("writing to a string");
            value(of, c, out);
            out.push_str(" }");
        }
    }
}

/// Returns one `section.key=VALUE`.
fn setting(c: &mut Choices<'_>) -> String {
    let key = c.pick(scenario::keys());
    let mut out = format!("{}.{}=", key.section, key.key);
    if c.byte() == 255 {
        let n = c.below(12);
        out.push_str(&String::from_utf8_lossy(c.take(n)));
    } else {
        value(&c.pick(key.accepts), c, &mut out);
    }
    out
}

/// Adds sizes for which planning takes well under a millisecond, for scenarios that are larger by
/// default.
fn small(c: &mut Choices<'_>, sets: &mut Vec<String>) {
    let [layers, accum, shape] = [c.byte(), c.byte(), c.byte()];
    sets.push(format!("model.layers={}", 1 + layers % 3));
    sets.push(format!(
        "train.grad_accum={}",
        [1, 1, 1, 2, 3][usize::from(accum % 5)]
    ));
    if shape % 4 > 0 {
        sets.push(format!(
            "mesh.dp_shard={}",
            [1, 2, 3, 4, 6, 8, 16][usize::from(shape / 4 % 7)]
        ));
    }
}

/// A small file of each family.
const MINIMAL: [&str; 7] = [
    "[model]\nfamily = 'llama'\nlayers = 2\nhidden = 16\nheads = 2\nffn = 24\nvocab = 32\nmax_seq_len = 8\n",
    "[model]\nfamily = 'decoder'\nlayers = 2\nhidden = 16\nheads = 2\nffn = 24\nvocab = 32\nmax_seq_len = 8\n",
    "[model]\nfamily = 'moe'\nlayers = 2\nhidden = 16\nheads = 2\nffn = 24\nvocab = 32\nmax_seq_len = 8\nexperts = 4\n",
    "[model]\nfamily = 'gpt2'\nlayers = 2\nhidden = 16\nheads = 2\nvocab = 33\n[train]\nseq_len = 8\n",
    "[model]\nfamily = 'encoder'\nlayers = 2\nhidden = 16\nheads = 2\nffn = 24\n[train]\nseq_len = 8\n",
    "[model]\nfamily = 'linear'\nlayers = 3\nhidden = 5\n",
    "[model]\nfamily = 'cnn'\nlayers = 3\nchannels = 3\nheight = 7\nwidth = 6\n",
];

/// Returns the scenario that an input describes.
pub(crate) fn choose(data: &[u8]) -> Result<Scenario, ScenarioError> {
    let mut c = Choices(data);
    let kind = c.byte() % 16;
    let (name, text) = c.pick(scenario::shipped());
    if kind == 0 {
        let text = String::from_utf8_lossy(c.0);
        return scenario::parse("fuzz", &text, &[]);
    }
    if kind < 3 {
        // A shipped file with parts overwritten, inserted and removed.
        let mut bytes = text.as_bytes().to_vec();
        for _ in 0..=c.below(4) {
            let at = (usize::from(c.byte()) << 8 | usize::from(c.byte())) % bytes.len().max(1);
            let cut = c.below(24).min(bytes.len() - at.min(bytes.len()));
            let n = c.below(24);
            bytes.splice(at..at + cut, c.take(n).iter().copied());
        }
        return scenario::parse(name, &String::from_utf8_lossy(&bytes), &[]);
    }
    let mut sets = Vec::new();
    for _ in 0..c.below(9) {
        sets.push(setting(&mut c));
    }
    if kind < 9 {
        small(&mut c, &mut sets);
        return scenario::load(name.as_ref(), &sets);
    }
    let text = c.pick(&MINIMAL);
    let text = format!("{text}[mesh]\nhardware = 'h100-80'\ndp_shard = 2\n");
    scenario::parse("minimal", &text, &sets)
}

/// Runs one input.
///
/// # Panics
/// Panics if the input reveals a bug.
pub(crate) fn run(data: &[u8], profiles: &[(&str, Profile)]) -> Reached {
    let scenario = match choose(data) {
        Ok(s) => s,
        Err(e) => {
            assert!(!e.to_string().is_empty() && !e.message().is_empty());
            return Reached::Refused;
        }
    };
    if u64::from(scenario.model.layers) * u64::from(scenario.train.grad_accum) > BLOCK_RUNS {
        return Reached::Large;
    }

    let program = match shardlab_plan::plan(&scenario) {
        Ok(p) => p,
        Err(e) => {
            assert!(!e.to_string().is_empty());
            return Reached::Unplanned;
        }
    };
    let report = check::check(&program);
    assert!(
        report.is_ok(),
        "{:?}\n{scenario:#?}",
        report.violations.iter().take(3).collect::<Vec<_>>()
    );
    let Some((_, profile)) = profiles.iter().find(|p| p.0 == scenario.mesh.hardware) else {
        return Reached::Unpriced;
    };
    match simulate_light(&program, profile, &Options::default()) {
        Ok(run) => {
            assert!(run.memory.peak_allocated <= run.memory.peak_reserved);
            Reached::Simulated
        }
        // Slow hardware and a large layer are rejected with a reason, which is not a bug.
        Err(SimError::Program(why)) if why.contains("beyond 1000 s") => Reached::Unpriced,
        // The hardware profile has no rates for this attention library.
        Err(e) if e.to_string().contains("does not know its rates") => Reached::Unpriced,
        Err(e) => panic!("{e}\n{scenario:#?}"),
    }
}

/// Returns all shipped profiles.
pub(crate) fn profiles() -> Vec<(&'static str, Profile)> {
    scenario::HARDWARE
        .iter()
        .map(|&name| {
            let profile = shardlab_sim::hardware::load(name).expect("a shipped profile");
            (name, profile)
        })
        .collect()
}
