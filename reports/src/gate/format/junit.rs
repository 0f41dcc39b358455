//! Formats verdicts as JUnit XML: one suite per scenario, and one case per finding. Findings that
//! fail for the same reason are one failure: the first one contains the details, and the others are
//! skipped and refer to it.
//!
//! JUnit readers differ. Some show only a failure's `message` and some only its text, so the text
//! starts with the message. Some print `NaN` for a case without a time, so cases have the time 0.

use super::{outcome, sentence};
use crate::gate::finding::{Finding, Status, Verdict};
use std::fmt::Write;

/// Formats the verdicts as a JUnit report.
#[must_use]
pub fn junit(verdicts: &[Verdict]) -> String {
    let skipped = |v: &Verdict| {
        let unjudged = |f: &&Finding| matches!(f.status, Status::Skipped | Status::Inconclusive);
        v.findings.iter().filter(unjudged).count() + v.failing().count() - v.failures.len()
    };
    let total = |of: &dyn Fn(&Verdict) -> usize| verdicts.iter().map(of).sum::<usize>();
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let _ = writeln!(
        out,
        "<testsuites name=\"shardlab gate\" tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{}\" time=\"0\">",
        total(&|v| v.findings.len()),
        total(&|v| v.failures.len()),
        total(&skipped),
    );
    for v in verdicts {
        let _ = writeln!(
            out,
            "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{}\" errors=\"0\" skipped=\"{}\" time=\"0\">",
            escaped(&v.scenario),
            v.findings.len(),
            v.failures.len(),
            skipped(v),
        );
        for f in &v.findings {
            case(&mut out, v, f);
        }
        out.push_str("  </testsuite>\n");
    }
    out.push_str("</testsuites>\n");
    out
}

fn case(out: &mut String, v: &Verdict, f: &Finding) {
    let _ = write!(
        out,
        "    <testcase name=\"{}\" classname=\"{}.{}\" time=\"0\"",
        escaped(&f.metric),
        escaped(&v.scenario),
        f.class.name()
    );
    if let Some(p) = &f.place {
        let _ = write!(out, " file=\"{}\" line=\"{}\"", escaped(&p.file), p.line);
    }
    let text = sentence(f);
    let failure = v.failures.iter().find(|x| x.metrics.contains(&f.metric));
    if let Some(failure) = failure.filter(|_| f.status.fails()) {
        if failure.metrics.first() != Some(&f.metric) {
            let first = failure.metrics.first().map_or("", String::as_str);
            let _ = write!(
                out,
                ">\n      <skipped message=\"{}\"/>\n    </testcase>\n",
                escaped(&format!("part of the failure of `{first}`: {text}"))
            );
            return;
        }
        let mut whole = failure.cause.clone();
        for f in v.of(failure) {
            whole.push_str(&format!("\n{}", outcome(f)));
        }
        for f in v.of(failure).filter(|f| !f.detail.is_empty()) {
            whole.push_str(&format!("\n{}:\n{}", f.metric, f.detail.trim_end()));
        }
        let _ = write!(
            out,
            ">\n      <failure type=\"{}\" message=\"{}\">{}</failure>\n    </testcase>\n",
            f.status.word().to_lowercase(),
            escaped(&failure.cause),
            escaped(&whole)
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

/// Escapes text for XML. Characters that XML 1.0 does not allow become `?`.
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
