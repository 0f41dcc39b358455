//! JUnit XML: a suite a scenario, a case a finding.
//!
//! Readers differ: some show a failure's `message` and some only its text, so the text begins with the message; some print
//! `NaN` for a case without a time, and a comparison takes none.

use super::sentence;
use crate::gate::finding::{Finding, Status, Verdict};
use std::fmt::Write;

/// The verdicts as a JUnit report.
#[must_use]
pub fn junit(verdicts: &[Verdict]) -> String {
    let count =
        |v: &Verdict, of: fn(Status) -> bool| v.findings.iter().filter(|f| of(f.status)).count();
    let skipped = |s: Status| matches!(s, Status::Skipped | Status::Inconclusive);
    let total = |of: &dyn Fn(&Verdict) -> usize| verdicts.iter().map(of).sum::<usize>();
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(
        out,
        "<testsuites name=\"shardlab gate\" tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{}\" time=\"0\">",
        total(&|v| v.findings.len()),
        total(&|v| count(v, Status::fails)),
        total(&|v| count(v, skipped)),
    );
    for v in verdicts {
        let _ = writeln!(
            out,
            "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{}\" time=\"0\">",
            escaped(&v.scenario),
            v.findings.len(),
            count(v, Status::fails),
            count(v, skipped),
        );
        for f in &v.findings {
            case(&mut out, &v.scenario, f);
        }
        out.push_str("  </testsuite>\n");
    }
    out.push_str("</testsuites>\n");
    out
}

fn case(out: &mut String, scenario: &str, f: &Finding) {
    let _ = write!(
        out,
        "    <testcase name=\"{}\" classname=\"{}.{}\" time=\"0\"",
        escaped(&f.metric),
        escaped(scenario),
        f.class.name()
    );
    if let Some(p) = &f.place {
        let _ = write!(out, " file=\"{}\" line=\"{}\"", escaped(&p.file), p.line);
    }
    let text = sentence(f);
    if f.status.fails() {
        let _ = write!(
            out,
            ">\n      <failure type=\"{}\" message=\"{}\">{}</failure>\n    </testcase>\n",
            f.status.word().to_lowercase(),
            escaped(&text),
            escaped(format!("{text}\n{}", f.detail).trim_end())
        );
    } else if matches!(f.status, Status::Skipped | Status::Inconclusive) {
        let _ = write!(
            out,
            ">\n      <skipped message=\"{}\"/>\n    </testcase>\n",
            escaped(&text)
        );
    } else if f.message.is_empty() {
        out.push_str("/>\n");
    } else {
        let _ = write!(
            out,
            ">\n      <system-out>{}</system-out>\n    </testcase>\n",
            escaped(&text)
        );
    }
}

/// Text for XML; characters that XML 1.0 cannot hold become `?`.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\n' | '\t' => out.push(c),
            c if (c as u32) < 0x20 || c as u32 == 0xfffe || c as u32 == 0xffff => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn text_cannot_end_an_element() {
        assert_eq!(escaped("a<b>&\"c\"\u{1}"), "a&lt;b&gt;&amp;&quot;c&quot;?");
    }
}
