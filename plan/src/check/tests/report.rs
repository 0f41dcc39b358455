//! The report itself.

use crate::check::testing::{Shape, Toy};
use crate::check::{RULES, RuleId, check};
use crate::program::{Op, Phase};

#[test]
fn the_table_fits_a_terminal_and_names_every_rule() {
    let text = check(&Toy::new(Shape::default()).b.program).to_string();
    let lines: Vec<&str> = text.lines().collect();
    // A heading, the rules, the total.
    assert_eq!(lines.len(), RULES.len() + 2, "{text}");
    for (line, r) in lines[1..].iter().zip(RULES) {
        assert!(line.starts_with(r.id) && line.ends_with(r.title), "{line}");
    }
    assert!(lines.iter().all(|l| l.len() <= 100), "{text}");
    assert!(
        lines[lines.len() - 1].ends_with("0 errors, 0 warnings"),
        "{text}"
    );
}

#[test]
fn json_has_rules_violations_and_waits() {
    let mut t = Toy::new(Shape::default());
    let free = t.at(
        1,
        Phase::Backward,
        0,
        |o| matches!(o, Op::Free(b) if *b == t.act[1]),
    );
    t.drop(free);
    let r = check(&t.b.program);
    let json = serde_json::to_value(&r).expect("serialisable");
    let leak = &json["violations"]
        .as_array()
        .expect("a list")
        .iter()
        .find(|v| v["rule"] == "CHK-LEAK")
        .expect("a leak");
    assert!(
        leak["instr"].is_u64()
            && leak["message"]
                .as_str()
                .is_some_and(|m| m.contains("act") || m.contains("activation"))
    );
    let rule = json["rules"]
        .as_array()
        .expect("a list")
        .iter()
        .find(|x| x["id"] == "CHK-LEAK")
        .expect("the rule");
    assert_eq!(rule["violations"], r.of(RuleId::Leak).count());
    assert_eq!(
        (rule["kind"].as_str(), rule["severity"].as_str()),
        (Some("memory"), Some("error"))
    );
    assert_eq!(json["waits"].as_array().map(Vec::len), Some(4));
}

#[test]
fn many_violations_of_a_rule_are_counted_and_some_kept() {
    let mut t = Toy::new(Shape {
        micro_batches: 40,
        ..Shape::default()
    });
    let waits = t.find(crate::program::SectionKind::Steady, |i| {
        i.rule == crate::program::Rule::GatherDone
    });
    for w in waits {
        t.drop(w);
    }
    let r = check(&t.b.program);
    let found = r
        .rules
        .iter()
        .find(|x| x.id == RuleId::GatherDone)
        .expect("the rule")
        .violations;
    assert!(
        found > 32 && r.of(RuleId::GatherDone).count() == 32,
        "{found}"
    );
}
