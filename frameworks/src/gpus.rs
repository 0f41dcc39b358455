//! The GPUs of a job: `8xh100`, `4x8xh200`, `h100`, or the path of a hardware profile.

use shardlab_plan::scenario::{HARDWARE, nearest};
use std::fmt;
use std::str::FromStr;

/// The GPUs that a job runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// Hardware profile: a shipped name or a path.
    pub hardware: String,
    /// Total number of GPUs, if given.
    pub count: Option<u64>,
    /// Number of GPUs per node, if given.
    pub per_node: Option<u64>,
}

/// Short names of shipped profiles.
const SHORT: [(&str, &str); 5] = [
    ("h100", "h100-80"),
    ("h200", "h200-nvlink"),
    ("a100", "a100-80"),
    ("a100-80gb", "a100-80"),
    ("h100-80gb", "h100-80"),
];

/// Maximum number of GPUs of a node. Larger numbers are names of GPUs.
const MAX_PER_NODE: u64 = 256;
/// Maximum number of GPUs.
const MAX_GPUS: u64 = 1 << 20;

impl FromStr for Gpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut numbers = Vec::new();
        let mut rest = text.trim();
        while numbers.len() < 2
            && let Some((first, after)) = rest.split_once(['x', '×'])
            && let Ok(n) = first.trim().parse::<u64>()
        {
            numbers.push(n);
            rest = after.trim();
        }
        let form = "expected COUNTxNAME or NODESxCOUNTxNAME, such as 8xh100 or 4x8xh200";
        let is_number = rest.chars().all(|c| c.is_ascii_digit());
        // GPUs such as the 4090 have numbers as names, which are larger than those of a node.
        let is_count = rest.parse::<u64>().is_ok_and(|n| n <= MAX_PER_NODE);
        if rest.is_empty() || is_number && (numbers.is_empty() || is_count) {
            return Err(form.to_owned());
        }
        let count = numbers
            .iter()
            .try_fold(1, |all: u64, n| all.checked_mul(*n));
        let Some(count) = count.filter(|n| (1..=MAX_GPUS).contains(n)) else {
            return Err(format!("expected 1 to {MAX_GPUS} GPUs"));
        };
        let lower = rest.to_ascii_lowercase();
        let short = SHORT.iter().find(|(short, _)| *short == lower);
        let hardware = short.map_or(rest, |(_, name)| *name);
        if !hardware.ends_with(".toml") && !HARDWARE.contains(&hardware) {
            let near = nearest(
                &lower,
                SHORT.map(|(name, _)| name).into_iter().chain(HARDWARE),
            );
            let near = near.map_or_else(String::new, |n| format!("; did you mean `{n}`?"));
            let near = if near.is_empty() { "." } else { &near };
            let shipped = HARDWARE.join(", ");
            return Err(format!(
                "no profile `{hardware}` is shipped{near} Shipped are {shipped}. For another GPU, \
                 `shardlab calibrate --device cuda --out gpu.toml` measures a profile, and `--gpus 8xgpu.toml` uses it \
                 ({form})"
            ));
        }
        Ok(Self {
            hardware: hardware.to_owned(),
            count: (!numbers.is_empty()).then_some(count),
            per_node: (numbers.len() == 2).then(|| numbers[1]),
        })
    }
}

impl Gpus {
    /// Returns the text form of these GPUs, such as `4x8xh100-80`.
    #[must_use]
    pub fn spec(&self) -> String {
        let name = &self.hardware;
        match (self.count, self.per_node) {
            (Some(count), Some(each)) => format!("{}x{each}x{name}", count / each.max(1)),
            (Some(count), None) => format!("{count}x{name}"),
            (None, _) => name.clone(),
        }
    }
}

impl fmt::Display for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(count) = self.count {
            write!(f, "{count} x ")?;
        }
        f.write_str(&self.hardware)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_nodes_and_short_names() {
        let gpus = |text: &str| text.parse::<Gpus>();
        let eight = gpus("8xh100").unwrap();
        assert_eq!((eight.hardware.as_str(), eight.count), ("h100-80", Some(8)));
        let nodes = gpus("4x8xH200").unwrap();
        assert_eq!((nodes.count, nodes.per_node), (Some(32), Some(8)));
        assert_eq!(nodes.hardware, "h200-nvlink");
        for text in ["4x8xh200-nvlink", "8xh100-80", "b200"] {
            assert_eq!(gpus(text).unwrap().spec(), text);
        }
        assert_eq!(gpus("b200").unwrap().count, None);
        let path = gpus("2xmy/exact.toml").unwrap();
        assert_eq!(
            (path.hardware.as_str(), path.count),
            ("my/exact.toml", Some(2))
        );
        assert!(gpus("8xh10").unwrap_err().contains("did you mean `h100`?"));
        for text in ["2x4090", "2xrtx4090", "2x8xa6000"] {
            let error = gpus(text).unwrap_err();
            let name = text.rsplit('x').next().unwrap();
            assert!(error.contains(name), "{error}");
            assert!(
                error.contains("is shipped") && error.contains("shardlab calibrate"),
                "{error}"
            );
            assert!(error.contains("h100-80"), "{error}");
        }
        for bad in ["", "8", "8x", "0xh100", "8x16", "9999999xh100", "eight"] {
            assert!(gpus(bad).is_err(), "{bad}");
        }
    }
}
