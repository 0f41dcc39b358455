//! Loads and checks profiles.

use super::profile::Profile;
use super::source::{ProfileError, read};
use super::{extend, overlap};
use shardlab_plan::hardware::{self, FormatError};
use shardlab_plan::ir::{CollectiveKind, DType};
use std::borrow::Cow;

/// Loads a shipped profile by name, or a profile file by path.
///
/// # Errors
/// Fails if there is no such profile, if it is not valid TOML of the format, or if it has
/// impossible numbers.
pub fn load(name_or_path: &str) -> Result<Profile, ProfileError> {
    parse(name_or_path, &read(name_or_path)?)
}

/// Returns the text of a shipped profile by name, or of a profile file by path. The profile must be
/// complete: it must not extend another one.
///
/// # Errors
/// Fails if there is no such profile, or if it extends another one.
pub fn text(name_or_path: &str) -> Result<Cow<'static, str>, ProfileError> {
    let text = read(name_or_path)?;
    if extend::extends(name_or_path, &text)? {
        return Err(ProfileError::Invalid {
            path: name_or_path.to_owned(),
            message: "it extends another profile, but a complete profile is needed here".into(),
        });
    }
    Ok(text)
}

/// Parses and checks a profile. `path` names it in errors. A profile that it extends is searched in
/// the same folder.
///
/// # Errors
/// Fails if the text is not a profile or has impossible numbers.
pub fn parse(path: &str, text: &str) -> Result<Profile, ProfileError> {
    let mut whole = extend::whole(path, text)?;
    let at = |e| ProfileError::format(path, e);
    hardware::complete(&mut whole, text).map_err(at)?;
    let profile: Result<Profile, _> = whole.try_into();
    let mut profile = profile.map_err(|e| ProfileError::parse(path, &e))?;
    check(&profile).map_err(|(key, message)| {
        at(FormatError {
            position: hardware::position(text, key),
            message,
        })
    })?;
    overlap::reconcile(&mut profile);
    Ok(profile)
}

/// Rejects numbers that contradict each other, and returns the key at fault. The table of the
/// format checks the limits of each number on its own.
fn check(p: &Profile) -> Result<(), (&'static str, String)> {
    let (d, n, c) = (&p.device, &p.network, &p.contention);
    if p.power.is_some() && d.loaded_rate < 1.0 {
        let message = format!(
            "device.loaded_rate = {} and [power]: both slow the same kernels, matmuls, convolutions and attention; leave one of \
             them out, [power] only where it was not measured",
            d.loaded_rate
        );
        return Err(("device.loaded_rate", message));
    }
    if c.collective_loss_compute + c.collective_loss_bandwidth >= 1.0 {
        let message = "contention: collectives would get no bandwidth next to compute".to_owned();
        return Err(("contention", message));
    }
    if n.sms_per_collective >= d.sms {
        let message = format!(
            "network.sms_per_collective = {}: the device has {} SMs",
            n.sms_per_collective, d.sms
        );
        return Err(("network.sms_per_collective", message));
    }
    for dtype in [DType::F32, DType::Bf16] {
        let tables = [
            ("device.tflops", d.tflops.contains_key(&dtype)),
            ("efficiency.gemm", p.efficiency.gemm.contains_key(&dtype)),
        ];
        if let Some((key, _)) = tables.into_iter().find(|(_, has)| !has) {
            let message = format!("device.tflops and efficiency.gemm need an entry for {dtype}");
            return Err((key, message));
        }
    }
    for table in p.gemm.iter().chain(&p.conv) {
        let about_float8 = [
            ("scaling", table.scaling.is_some()),
            ("fast_accum", table.fast_accum.is_some()),
        ];
        let given = about_float8.into_iter().find(|(_, given)| *given);
        if let (Some((key, _)), None) = (given, table.dtype.float8_max()) {
            let message = format!(
                "[[gemm]] with dtype = \"{}\" and {key}: only 8-bit matmuls have scales",
                table.dtype
            );
            return Err(("gemm", message));
        }
    }
    for backend in p.attention.iter().filter_map(|t| t.backend) {
        if p.attention_backend.iter().all(|r| r.backend != backend) {
            let message = format!(
                "[[attention]] with backend = \"{0}\": there is no [[attention_backend]] of {0}, which has its rates for other shapes",
                backend.name()
            );
            return Err(("attention", message));
        }
    }
    for t in &p.collective {
        if !t.ranks.is_multiple_of(t.nodes) {
            let message = format!(
                "[[collective]]: {} with ranks = {} and nodes = {}: ranks must be a multiple of nodes",
                CollectiveKind::from(t.kind).name(),
                t.ranks,
                t.nodes
            );
            return Err(("collective", message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::profile::MemoryClass;
    use super::super::source::{SHIPPED, shipped};
    use super::*;
    use shardlab_plan::ir::{Float8Gemm, ScaleMode};

    fn text(name: &str) -> &'static str {
        SHIPPED.iter().find(|s| s.0 == name).unwrap().1
    }

    #[test]
    fn shipped_profiles_load_and_carry_their_names() {
        for name in shipped() {
            let profile = load(name).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(profile.name, name);
        }
    }

    #[test]
    fn unknown_profile_lists_the_shipped_ones() {
        let message = load("h300").unwrap_err().to_string();
        assert!(
            message.contains("h300") && message.contains("h200-nvlink"),
            "{message}"
        );
    }

    #[test]
    fn impossible_numbers_are_named() {
        let text = text("h200-nvlink");
        let broken = text.replace("memory_gbps = 4800", "memory_gbps = -1");
        assert_ne!(text, broken);
        let message = parse("x.toml", &broken).unwrap_err().to_string();
        assert!(
            message.starts_with("x.toml:") && message.contains(": device.memory_gbps"),
            "{message}"
        );
        let lonely = text.replace("nvlink_ranks = 4", "nvlink_ranks = 1");
        let message = parse("x.toml", &lonely).unwrap_err().to_string();
        assert!(
            message.starts_with("x.toml:") && message.contains(": network.nvlink_ranks = 1"),
            "{message}"
        );
        let faster = text.replace("misaligned_factor = 1.6", "misaligned_factor = 0.5");
        assert_ne!(text, faster);
        let message = parse("x.toml", &faster).unwrap_err().to_string();
        assert!(
            message.starts_with("x.toml:") && message.contains(": network.misaligned_factor = 0.5"),
            "{message}"
        );
    }

    #[test]
    fn ranks_of_a_table_are_spread_evenly() {
        let falling = "\n[[collective]]\nsource = \"s\"\nkind = \"all_gather\"\nranks = 2\nrows = [[1024, 5.0]]\nnccl_rows = [[1024, 5.0], [1024, 6.0]]\n";
        let message = parse("x.toml", &format!("{}{falling}", text("cpu")))
            .unwrap_err()
            .to_string();
        assert!(message.contains("must ascend in bytes"), "{message}");
        let table = "\n[[collective]]\nsource = \"s\"\nkind = \"all_gather\"\nranks = 12\nnodes = 8\nrows = [[1024, 5.0]]\n";
        let with = |table: &str| parse("x.toml", &format!("{}{table}", text("h100-80")));
        let message = with(table).unwrap_err().to_string();
        assert!(
            message.contains("[[collective]]: all_gather with ranks = 12 and nodes = 8"),
            "{message}"
        );
        assert!(with(&table.replace("nodes = 8", "nodes = 0")).is_err());
        assert!(with(&table.replace("nodes = 8", "nodes = 4")).is_ok());
    }

    /// Numbers that affect the time of a step are rejected in every section: for example a wrong
    /// sign, NaN, or more than the maximum.
    #[test]
    fn numbers_that_cannot_be_are_refused_wherever_they_stand() {
        let text = text("cpu");
        let with = |from: &str, to: &str| {
            let at = text.find(from).unwrap_or_else(|| panic!("{from}"));
            let line = text[at..].lines().next().unwrap();
            let broken = text.replacen(line, to, 1);
            parse("x.toml", &broken).unwrap_err().to_string()
        };
        for (line, broken, wanted) in [
            (
                "tflops =",
                "tflops = { f32 = -0.2, bf16 = 0.2 }",
                "device.tflops of f32 = -0.2",
            ),
            (
                "kernel_gap_us",
                "kernel_gap_us = nan",
                "device.kernel_gap_us = NaN: must be 0 or",
            ),
            (
                "kernel_gap_us",
                "kernel_gap_us = 1\nloaded_rate = -1",
                "device.loaded_rate = -1",
            ),
            (
                "kernel_gap_us",
                "kernel_gap_us = 1\nloaded_rate = 1.5",
                "must be in (0, 1]",
            ),
            (
                "collective_us",
                "collective_us = -50",
                "host.collective_us = -50",
            ),
            ("hook_us", "hook_us = inf", "host.work.hook_us = inf"),
            ("turn_loss", "turn_loss = 1.5", "contention.turn_loss = 1.5"),
            (
                "start_wait =",
                "start_wait = 1\nd2h_loss = -0.5",
                "contention.d2h_loss = -0.5",
            ),
            (
                "[host.work]",
                "[scale]\nsource = \"s\"\nmemory = 0\n[host.work]",
                "scale.memory = 0: must be between 0.01 and 1000",
            ),
            (
                "[host.work]",
                "[scale]\nsource = \"\"\n[host.work]",
                "every section needs a `source`",
            ),
            (
                "shared_wait_us",
                "shared_wait_us = -1",
                "contention.shared_wait_us = -1",
            ),
            (
                "nvlink_efficiency",
                "nvlink_efficiency = 2",
                "network.nvlink_efficiency = 2",
            ),
            (
                "gemm =",
                "gemm = { f32 = 7.0, bf16 = 0.8 }",
                "efficiency.gemm of f32 = 7: must be in",
            ),
            ("attention =", "attention = 0", "efficiency.attention = 0"),
        ] {
            let message = with(line, broken);
            assert!(message.contains(wanted), "{broken}: {message}");
        }
        for (table, row) in [
            (
                "[[gemm]]\nsource = \"s\"\ndtype = \"f32\"",
                "[0, 8, 8, 1.0]",
            ),
            (
                "[[gemm]]\nsource = \"s\"\ndtype = \"f32\"",
                "[8, 8, 8, -5.0]",
            ),
            (
                "[[conv]]\nsource = \"s\"\ndtype = \"f32\"",
                "[8, 8, 8, nan]",
            ),
            (
                "[[attention]]\nsource = \"s\"\ndtype = \"f32\"\ncausal = true\nbackward = false",
                "[1, 8, 8, 0, 64, 1.0]",
            ),
            ("[[memory]]\nsource = \"s\"\nclass = \"norm\"", "[8, inf]"),
        ] {
            let message = parse("x.toml", &format!("{text}\n{table}\nrows = [{row}]\n"));
            let message = message.unwrap_err().to_string();
            assert!(message.contains("positive"), "{table} {row}: {message}");
        }
    }

    /// Tables of 8-bit matmuls describe their recipe; tables of other types must not.
    #[test]
    fn only_8_bit_matmuls_have_scales() {
        let with = |keys: &str| {
            let table =
                format!("\n[[gemm]]\nsource = \"test\"\n{keys}\nrows = [[64, 64, 64, 9.0]]\n");
            let text = format!("{}{table}", text("h100-80"));
            parse("x.toml", &text)
        };
        let kind = |keys: &str| {
            let profile = with(keys).unwrap();
            profile.gemm.last().unwrap().kind().float8.unwrap()
        };
        assert_eq!(kind("dtype = \"f8e4m3\""), Float8Gemm::FASTEST);
        assert_eq!(
            kind("dtype = \"f8e5m2\"\nscaling = \"blockwise\"\nfast_accum = false"),
            Float8Gemm {
                scaling: ScaleMode::Blockwise,
                fast_accum: false
            }
        );
        let refused = |keys: &str| with(keys).unwrap_err().to_string();
        let message = refused("dtype = \"bf16\"\nfast_accum = true");
        assert!(
            message.contains("dtype = \"bf16\" and fast_accum: only 8-bit matmuls have scales"),
            "{message}"
        );
        let message = refused("dtype = \"f8e4m3\"\nscaling = \"rowise\"");
        assert!(message.contains("rowwise"), "{message}");
    }

    #[test]
    fn a_power_limit_has_a_share_and_a_slope_below_one_and_a_source() {
        let text = text("h200-nvlink-exec");
        assert!(parse("x.toml", text).unwrap().power.is_some());
        for (key, value) in [("arithmetic_share", "1.5"), ("arithmetic_slope", "-0.1")] {
            let line = text.lines().find(|l| l.starts_with(key)).unwrap();
            let broken = text.replace(line, &format!("{key} = {value}"));
            let message = parse("x.toml", &broken).unwrap_err().to_string();
            let wanted = format!(": power.{key} = {value}: must be between 0 and 1");
            assert!(message.ends_with(&wanted), "{message}");
        }
        let (before, power) = text.split_once("[power]\nsource = \"").unwrap();
        let without = format!("{before}[power]\nsource = \"\"#{power}");
        let message = parse("x.toml", &without).unwrap_err().to_string();
        assert!(
            message.ends_with(": every section needs a `source`"),
            "{message}"
        );
    }

    #[test]
    fn arithmetic_is_slowed_by_a_rate_or_by_the_power_limit() {
        let with = |rate: &str| {
            let line = "[device]\n";
            let text = text("h200-nvlink-exec");
            assert!(!text.contains("loaded_rate"));
            parse(
                "x.toml",
                &text.replacen(line, &format!("{line}loaded_rate = {rate}\n"), 1),
            )
        };
        let message = with("0.95").unwrap_err().to_string();
        assert!(
            message.contains(": device.loaded_rate = 0.95 and [power]: both slow"),
            "{message}"
        );
        // A rate of one slows nothing.
        assert!(with("1.0").unwrap().power.is_some());
        // Each is valid alone, and the shipped profiles use both, but never together.
        let ways = shipped().into_iter().map(|name| {
            let p = load(name).unwrap();
            (p.device.loaded_rate < 1.0, p.power.is_some())
        });
        let ways: std::collections::BTreeSet<(bool, bool)> = ways.collect();
        let either = [(false, false), (false, true), (true, false)];
        assert_eq!(ways, either.into_iter().collect());
    }

    /// The table of the format and the types agree: a profile with every key can be read.
    #[test]
    fn every_key_of_the_format_is_read() {
        let (mut text, mut keys) = (String::new(), 0);
        for section in hardware::SECTIONS {
            let mut all = hardware::SectionText::new(section.path);
            for field in section.fields.iter().filter(|f| f.key != "extends") {
                all = all.set(field.key, example(field.kind));
                keys += 1;
            }
            all.write(&mut text);
        }
        assert!(keys > 100, "{keys}");
        let read = parse("all.toml", &text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert!(read.power.is_some() && read.contention.turn_loss.is_some());
        assert_eq!((read.gemm.len(), read.collective.len()), (1, 1));
        assert_eq!(read.efficiency.memory.len(), MemoryClass::ALL.len());
    }

    /// Returns a value that does not contradict any other key.
    fn example(kind: hardware::Kind) -> String {
        use hardware::Kind;
        let number = |range| match range {
            hardware::Range::Share => "0.25",
            _ => "1.0",
        };
        match kind {
            Kind::Text => "\"x\"".to_owned(),
            Kind::Flag => "true".to_owned(),
            Kind::Integer(low, _) => low.to_string(),
            Kind::Number(range) => number(range).to_owned(),
            Kind::Dtype => "\"f8e4m3\"".to_owned(),
            Kind::Word(words) => format!("{:?}", words[0]),
            Kind::ByDtype(range) => format!("{{ f32 = {0}, bf16 = {0} }}", number(range)),
            Kind::Rows { sizes, last, .. } => {
                format!("[[{}{}]]", "8, ".repeat(sizes.len()), number(last.1))
            }
        }
    }

    #[test]
    fn shipped_profiles_are_documented() {
        let docs = include_str!("../../../docs/reference/hardware-profiles.md");
        for name in shipped() {
            assert!(docs.contains(&format!("`{name}`")), "{name}");
        }
    }

    #[test]
    fn unknown_keys_are_refused() {
        let text = text("cpu");
        let message = parse("x.toml", &format!("colour = 1\n{text}"))
            .unwrap_err()
            .to_string();
        assert!(message.contains("colour"), "{message}");
    }
}
