//! Loading and checking profiles.

use super::profile::{AttentionRow, GemmRow, MemoryClass, Profile};
use super::source::{ProfileError, read};
use super::{extend, overlap};
use crate::part::{Part, SCALES};
use shardlab_plan::ir::{CollectiveKind, DType};
use std::borrow::Cow;

/// Loads a shipped profile by name, or a profile file by path.
///
/// # Errors
/// When there is no such profile, or when it does not parse or has impossible numbers.
pub fn load(name_or_path: &str) -> Result<Profile, ProfileError> {
    parse(name_or_path, &read(name_or_path)?)
}

/// The text of a shipped profile by name, or of a profile file by path, which says all there is:
/// none that extends another one.
///
/// # Errors
/// When there is no such profile, or it extends another one.
pub fn text(name_or_path: &str) -> Result<Cow<'static, str>, ProfileError> {
    let text = read(name_or_path)?;
    if extend::whole(name_or_path, &text)?.is_some() {
        return Err(ProfileError::Invalid {
            path: name_or_path.to_owned(),
            message: "it extends another profile, but a complete profile is needed here".into(),
        });
    }
    Ok(text)
}

/// Parses and checks a profile; `path` names it in errors, and what it extends is looked for beside
/// it.
///
/// # Errors
/// When the text is no profile or has impossible numbers.
pub fn parse(path: &str, text: &str) -> Result<Profile, ProfileError> {
    let parsed = match extend::whole(path, text)? {
        Some(whole) => whole.try_into(),
        None => toml::from_str(text),
    };
    let mut profile: Profile = parsed.map_err(|e| ProfileError::parse(path, &e))?;
    check(&profile).map_err(|message| ProfileError::Invalid {
        path: path.to_owned(),
        message,
    })?;
    overlap::reconcile(&mut profile);
    Ok(profile)
}

fn check(p: &Profile) -> Result<(), String> {
    let d = &p.device;
    let n = &p.network;
    let positive = [
        ("device.sms", f64::from(d.sms)),
        ("device.memory_gbps", d.memory_gbps),
        ("device.h2d_gbps", d.h2d_gbps),
        ("device.d2h_gbps", d.d2h_gbps),
        ("device.min_kernel_us", d.min_kernel_us),
        ("network.nvlink_gbps", n.nvlink_gbps),
        ("network.nics_per_node", f64::from(n.nics_per_node)),
        ("network.nic_gbps", n.nic_gbps),
        ("host.queue_depth", f64::from(p.host.queue_depth)),
        (
            "efficiency.attention_backward_fixed_order",
            p.efficiency.attention_backward_fixed_order.unwrap_or(1.0),
        ),
    ];
    for (name, value) in positive {
        if !(value.is_finite() && value > 0.0) {
            return Err(format!("{name} = {value}: must be a positive number"));
        }
    }
    if let Some(m) = &p.measured
        && (m.on.trim().is_empty() || m.gpus == 0)
    {
        return Err(
            "measured: `on` names the machine, and `gpus`, at least 1, is how many of its GPUs ran together"
                .into(),
        );
    }
    if let Some(m) = p.efficiency.gemm_misaligned {
        for (name, factor) in [("even", m.even), ("odd", m.odd)] {
            if !(factor.is_finite() && factor >= 1.0) {
                return Err(format!(
                    "efficiency.gemm_misaligned.{name} = {factor}: must be a number of at least 1"
                ));
            }
        }
    }
    if n.nvlink_ranks < 2 {
        return Err(format!(
            "network.nvlink_ranks = {}: a collective has at least 2 ranks",
            n.nvlink_ranks
        ));
    }
    if n.nvlink_domain == Some(0) {
        return Err("network.nvlink_domain = 0: NVLink connects at least 1 GPU".into());
    }
    if !(n.misaligned_factor.is_finite() && n.misaligned_factor >= 1.0) {
        let value = n.misaligned_factor;
        return Err(format!(
            "network.misaligned_factor = {value}: must be at least 1"
        ));
    }
    let (h, w) = (&p.host, &p.host.work);
    let not_negative = [
        ("device.kernel_gap_us", d.kernel_gap_us),
        ("device.graph_gap_us", d.graph_gap_us),
        ("device.launch_latency_us", d.launch_latency_us),
        ("device.event_latency_us", d.event_latency_us),
        ("device.copy_latency_us", d.copy_latency_us),
        ("host.launch_us", h.launch_us),
        ("host.collective_us", h.collective_us),
        ("host.copy_us", h.copy_us),
        ("host.event_us", h.event_us),
        ("host.host_wait_us", h.host_wait_us),
        ("host.alloc_us", h.alloc_us),
        ("host.device_alloc_us", h.device_alloc_us),
        ("host.graph_launch_us", h.graph_launch_us),
        ("host.work.dispatch_us", w.dispatch_us),
        ("host.work.autograd_dispatch_us", w.autograd_dispatch_us),
        ("host.work.guard_us", w.guard_us),
        ("host.work.graph_break_us", w.graph_break_us),
        ("host.work.hook_us", w.hook_us),
        ("host.work.hook_param_us", w.hook_param_us),
        ("host.work.optimizer_step_us", w.optimizer_step_us),
        ("host.work.step_us", w.step_us),
        ("network.nic_latency_us", n.nic_latency_us),
        (
            "contention.start_wait_min_us",
            p.contention.start_wait_min_us,
        ),
        ("contention.shared_wait_us", p.contention.shared_wait_us),
    ];
    for (name, value) in not_negative {
        if !(value.is_finite() && value >= 0.0) {
            return Err(format!("{name} = {value}: must be 0 or a positive number"));
        }
    }
    for part in Part::ALL {
        let times = p.times(part);
        if !SCALES.contains(&times) {
            let name = part.name();
            return Err(format!(
                "scale.{name} = {times}: must be between 0.01 and 1000"
            ));
        }
    }
    let e = &p.efficiency;
    let rates = [
        ("device.loaded_rate", d.loaded_rate),
        ("network.nvlink_efficiency", n.nvlink_efficiency),
        ("network.nic_efficiency", n.nic_efficiency),
        ("efficiency.conv", e.conv),
        ("efficiency.attention", e.attention),
        ("efficiency.attention_backward", e.attention_backward),
    ];
    for (name, value) in rates {
        if !(value > 0.0 && value <= 1.0) {
            return Err(format!("{name} = {value}: must be in (0, 1]"));
        }
    }
    if p.power.is_some() && d.loaded_rate < 1.0 {
        return Err(format!(
            "device.loaded_rate = {} and [power]: both slow the same kernels, products, convolutions and attention; leave one of \
             them out, [power] only where it was not measured",
            d.loaded_rate
        ));
    }
    for (dtype, value) in &d.tflops {
        if !(value.is_finite() && *value > 0.0) {
            return Err(format!(
                "device.tflops of {dtype} = {value}: must be a positive number"
            ));
        }
    }
    for (dtype, value) in &e.gemm {
        if !(*value > 0.0 && *value <= 1.0) {
            return Err(format!(
                "efficiency.gemm of {dtype} = {value}: must be in (0, 1]"
            ));
        }
    }
    let c = &p.contention;
    let shares = [
        (
            "contention.collective_loss_compute",
            c.collective_loss_compute,
        ),
        (
            "contention.collective_loss_bandwidth",
            c.collective_loss_bandwidth,
        ),
        ("contention.collective_bandwidth", c.collective_bandwidth),
        ("contention.start_wait", c.start_wait),
        ("contention.start_wait_priority", c.start_wait_priority),
        ("contention.shared_loss", c.shared_loss),
        ("contention.h2d_loss", c.h2d_loss),
        ("contention.d2h_loss", c.d2h_loss),
    ];
    let power = p.power.iter().flat_map(|p| {
        [
            ("power.arithmetic_share", p.arithmetic_share),
            ("power.arithmetic_slope", p.arithmetic_slope),
        ]
    });
    let turns = c.turn_loss.map(|loss| ("contention.turn_loss", loss));
    for (name, value) in shares.into_iter().chain(turns).chain(power) {
        if !(0.0..=1.0).contains(&value) {
            return Err(format!("{name} = {value}: must be between 0 and 1"));
        }
    }
    if c.collective_loss_compute + c.collective_loss_bandwidth >= 1.0 {
        return Err("contention: collectives would get no bandwidth next to compute".into());
    }
    if d.shared_cores == Some(0) || !(1..=2).contains(&p.host.steps_in_flight) {
        return Err("device.shared_cores must be positive, host.steps_in_flight 1 or 2".into());
    }
    let whole = |t: &(u64, u64, f64)| t.0 > 0 && t.1 > 0 && t.2 > 0.0 && t.2 <= 1.0;
    if !p.efficiency.gemm_tiles.iter().all(whole) {
        return Err("efficiency.gemm_tiles: sizes are positive, rates in (0, 1]".into());
    }
    if n.sms_per_collective >= d.sms {
        return Err(format!(
            "network.sms_per_collective = {}: the device has {} SMs",
            n.sms_per_collective, d.sms
        ));
    }
    for dtype in [DType::F32, DType::Bf16] {
        if !d.tflops.contains_key(&dtype) || !p.efficiency.gemm.contains_key(&dtype) {
            return Err(format!(
                "device.tflops and efficiency.gemm need an entry for {dtype}"
            ));
        }
    }
    for class in MemoryClass::ALL {
        match p.efficiency.memory.get(&class) {
            Some(e) if *e > 0.0 && *e <= 1.0 => {}
            Some(e) => {
                return Err(format!(
                    "efficiency.memory of {class:?} = {e}: must be in (0, 1]"
                ));
            }
            None => return Err(format!("efficiency.memory has no entry for {class:?}")),
        }
    }
    let time = |us: f64| us.is_finite() && us > 0.0;
    let products = p.gemm.iter().chain(&p.conv).flat_map(|t| &t.rows);
    for GemmRow(m, n, k, us) in products {
        if [m, n, k].contains(&&0) || !time(*us) {
            return Err(format!(
                "[[gemm]] or [[conv]]: row [{m}, {n}, {k}, {us}]: sizes and time must be positive"
            ));
        }
    }
    for AttentionRow(b, h, kv, s, width, us) in p.attention.iter().flat_map(|t| &t.rows) {
        if [b, h, kv, s, width].contains(&&0) || !time(*us) {
            return Err(format!(
                "[[attention]]: row [{b}, {h}, {kv}, {s}, {width}, {us}]: sizes and time must be positive"
            ));
        }
    }
    let ascending = |rows: &[(u64, f64)]| {
        rows.windows(2).all(|w| w[0].0 < w[1].0) && rows.iter().all(|r| time(r.1))
    };
    if p.memory.iter().any(|t| !ascending(&t.rows))
        || p.collective
            .iter()
            .any(|t| !ascending(&t.rows) || !ascending(&t.nccl_rows))
    {
        return Err(
            "rows of [[memory]] and [[collective]] must ascend in bytes and have positive times"
                .into(),
        );
    }
    for t in &p.collective {
        if t.nodes == 0 || t.ranks == 0 || !t.ranks.is_multiple_of(t.nodes) {
            return Err(format!(
                "[[collective]]: {} with ranks = {} and nodes = {}: both must be positive, and ranks must be a multiple of nodes",
                CollectiveKind::from(t.kind).name(),
                t.ranks,
                t.nodes
            ));
        }
    }
    let sources = [
        &d.source,
        &n.source,
        &c.source,
        &p.host.source,
        &p.footprint.source,
        &p.efficiency.source,
    ];
    let sources = sources.into_iter().chain(p.power.iter().map(|p| &p.source));
    let sources = sources.chain(p.scale.iter().map(|s| &s.source));
    let tables = p.gemm.iter().chain(&p.conv).map(|t| &t.source);
    let more = p
        .attention
        .iter()
        .map(|t| &t.source)
        .chain(p.memory.iter().map(|t| &t.source));
    let all = sources
        .chain(tables)
        .chain(more)
        .chain(p.collective.iter().map(|t| &t.source));
    if all.into_iter().any(|s| s.trim().is_empty()) {
        return Err("every section needs a `source`".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::source::{SHIPPED, shipped};
    use super::*;

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
            message.starts_with("x.toml: device.memory_gbps"),
            "{message}"
        );
        let lonely = text.replace("nvlink_ranks = 4", "nvlink_ranks = 1");
        let message = parse("x.toml", &lonely).unwrap_err().to_string();
        assert!(
            message.starts_with("x.toml: network.nvlink_ranks = 1"),
            "{message}"
        );
        let faster = text.replace("misaligned_factor = 3.0", "misaligned_factor = 0.5");
        assert_ne!(text, faster);
        let message = parse("x.toml", &faster).unwrap_err().to_string();
        assert!(
            message.starts_with("x.toml: network.misaligned_factor = 0.5"),
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
            message.starts_with("x.toml: [[collective]]: all_gather with ranks = 12 and nodes = 8"),
            "{message}"
        );
        assert!(with(&table.replace("nodes = 8", "nodes = 0")).is_err());
        assert!(with(&table.replace("nodes = 8", "nodes = 4")).is_ok());
    }

    /// Every number that a step's time is made of: a sign, no number, more than all there is, an
    /// empty product.
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

    #[test]
    fn a_power_limit_has_a_share_and_a_slope_below_one_and_a_source() {
        let text = text("h200-nvlink-exec");
        assert!(parse("x.toml", text).unwrap().power.is_some());
        for (key, value) in [("arithmetic_share", "1.5"), ("arithmetic_slope", "-0.1")] {
            let line = text.lines().find(|l| l.starts_with(key)).unwrap();
            let broken = text.replace(line, &format!("{key} = {value}"));
            let message = parse("x.toml", &broken).unwrap_err().to_string();
            let wanted = format!("x.toml: power.{key} = {value}: must be between 0 and 1");
            assert_eq!(message, wanted);
        }
        let (before, power) = text.split_once("[power]\nsource = \"").unwrap();
        let without = format!("{before}[power]\nsource = \"\"#{power}");
        let message = parse("x.toml", &without).unwrap_err().to_string();
        assert_eq!(message, "x.toml: every section needs a `source`");
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
            message.starts_with("x.toml: device.loaded_rate = 0.95 and [power]: both slow"),
            "{message}"
        );
        // A rate of one slows nothing.
        assert!(with("1.0").unwrap().power.is_some());
        // Each alone is fine: the shipped profiles have both ways, none of them twice.
        let ways = shipped().into_iter().map(|name| {
            let p = load(name).unwrap();
            (p.device.loaded_rate < 1.0, p.power.is_some())
        });
        let ways: std::collections::BTreeSet<(bool, bool)> = ways.collect();
        let either = [(false, false), (false, true), (true, false)];
        assert_eq!(ways, either.into_iter().collect());
    }

    /// docs/hardware.md names every key: those that a section expects, as its error about another
    /// one lists them.
    #[test]
    fn every_key_is_documented() {
        let docs = include_str!("../../../docs/hardware.md");
        let text = text("h200-nvlink-exec");
        let mut keys = 0;
        for section in [
            "[device]",
            "[footprint]",
            "[host]",
            "[host.work]",
            "[network]",
            "[contention]",
            "[power]",
            "[efficiency]",
            "[[gemm]]",
            "[[attention]]",
            "[[memory]]",
            "[[collective]]",
        ] {
            assert!(docs.contains(&format!("`{section}`")), "{section}");
            let line = format!("\n{section}\n");
            let broken = text.replacen(&line, &format!("{line}surely_unknown = 1\n"), 1);
            let message = parse("x.toml", &broken).unwrap_err().to_string();
            let expected = message.split_once("expected one of").unwrap().1;
            for key in expected
                .split('`')
                .skip(1)
                .step_by(2)
                .filter(|k| !matches!(*k, "source" | "work" | "memory" | "rows"))
            {
                assert!(docs.contains(&format!("`{key}`")), "{section}: {key}");
                keys += 1;
            }
        }
        assert!(keys > 70, "{keys}");
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
