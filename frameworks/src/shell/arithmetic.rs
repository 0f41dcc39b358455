//! Integer arithmetic of shells: `$((…))`, `((…))` and `expr`.

/// Maximum nesting of parentheses and unary operators.
const MAX_DEPTH: usize = 64;

/// Binary operators by precedence, the loosest first, as in C.
const LEVELS: [&[&str]; 7] = [
    &["||"],
    &["&&"],
    &["==", "!=", "="],
    &["<=", ">=", "<", ">"],
    &["+", "-"],
    &["*", "/", "%"],
    &["**"],
];

/// Evaluates an expression. `value` gives the integer of a variable, or of the contents of
/// `${…}`.
///
/// Returns `None` if the expression has a variable without value, an operator that is not known
/// (assignments among them), or a result that does not fit in 64 bits.
pub(super) fn evaluate(text: &str, value: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let mut parser = Parser {
        rest: text,
        depth: 0,
        value,
    };
    let result = parser.choice()?;
    parser.rest.trim_start().is_empty().then_some(result)
}

/// Returns the variable that an expression assigns to, and the expression of its new value:
/// `A /= 2` gives `A` and `A/(2)`.
pub(super) fn assignment(text: &str) -> Option<(String, String)> {
    let text = text.trim();
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    for (step, operator) in [("++", '+'), ("--", '-')] {
        let name = text.strip_suffix(step).or(text.strip_prefix(step));
        if let Some(name) = name.map(str::trim)
            && !name.is_empty()
            && name.chars().all(is_part)
        {
            return Some((name.to_owned(), format!("{name}{operator}1")));
        }
    }
    let end = text.find(|c| !is_part(c))?;
    let (name, rest) = text.split_at(end);
    if !name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        return None;
    }
    let rest = rest.trim_start();
    if let Some(value) = rest.strip_prefix('=') {
        return (!value.starts_with('=')).then(|| (name.to_owned(), value.to_owned()));
    }
    let (operator, value) = rest.split_once('=')?;
    let is_operator = matches!(operator, "+" | "-" | "*" | "/" | "%");
    is_operator.then(|| (name.to_owned(), format!("{name}{operator}({value})")))
}

struct Parser<'t> {
    rest: &'t str,
    depth: usize,
    value: &'t dyn Fn(&str) -> Option<i64>,
}

impl Parser<'_> {
    fn take(&mut self, token: &str) -> bool {
        let rest = self.rest.trim_start().strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Reads `condition ? a : b`.
    fn choice(&mut self) -> Option<i64> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let condition = self.binary(0)?;
        let result = if self.take("?") {
            let yes = self.choice()?;
            let no = self.take(":").then(|| self.choice())??;
            if condition != 0 { yes } else { no }
        } else {
            condition
        };
        self.depth -= 1;
        Some(result)
    }

    fn binary(&mut self, level: usize) -> Option<i64> {
        let Some(operators) = LEVELS.get(level) else {
            return self.unary();
        };
        let mut left = self.binary(level + 1)?;
        while let Some(operator) = self.operator(operators) {
            // Powers group from the right.
            let next = if operator == "**" { level } else { level + 1 };
            let right = self.binary(next)?;
            left = apply(left, operator, right)?;
        }
        Some(left)
    }

    /// Takes the next operator if it is one of a level, and not the start of a longer one.
    fn operator(&mut self, operators: &[&'static str]) -> Option<&'static str> {
        let rest = self.rest.trim_start();
        let all = LEVELS.iter().copied().flatten();
        let longest = all
            .filter(|o| rest.starts_with(**o))
            .max_by_key(|o| o.len())?;
        let found = operators.iter().find(|o| *o == longest)?;
        self.take(found);
        Some(found)
    }

    fn unary(&mut self) -> Option<i64> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let result = if self.take("(") {
            let inner = self.choice()?;
            self.take(")").then_some(inner)
        } else if self.take("!") {
            self.unary().map(|n| i64::from(n == 0))
        } else if self.take("-") {
            self.unary().and_then(i64::checked_neg)
        } else if self.take("+") {
            self.unary()
        } else {
            self.operand()
        };
        self.depth -= 1;
        result
    }

    /// Reads a number or a variable: `N`, `$N`, `${N:-8}`, `B[1]`.
    fn operand(&mut self) -> Option<i64> {
        let rest = self.rest.trim_start();
        let name = if let Some(inner) = rest.strip_prefix("${") {
            let (name, rest) = inner.split_at(closing(inner, '{', '}')?);
            self.rest = &rest[1..];
            name
        } else {
            let rest = rest.strip_prefix('$').unwrap_or(rest);
            let is_part = |c: char| c.is_ascii_alphanumeric() || "_#?".contains(c);
            let mut end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
            if let Some(index) = rest[end..].strip_prefix('[') {
                end += closing(index, '[', ']')? + 2;
            }
            let (name, rest) = rest.split_at(end);
            self.rest = rest;
            name
        };
        match name.parse() {
            Ok(number) => Some(number),
            Err(_) if name.is_empty() => None,
            Err(_) => (self.value)(name),
        }
    }
}

/// Returns where the bracket closes that was opened before a text.
fn closing(text: &str, open: char, close: char) -> Option<usize> {
    let mut depth = 1_usize;
    text.char_indices().find_map(|(at, c)| {
        if c == open {
            depth += 1;
        } else if c == close {
            depth -= 1;
        }
        (depth == 0).then_some(at)
    })
}

fn apply(a: i64, operator: &str, b: i64) -> Option<i64> {
    let truth = |b: bool| Some(i64::from(b));
    match operator {
        "||" => truth(a != 0 || b != 0),
        "&&" => truth(a != 0 && b != 0),
        "==" | "=" => truth(a == b),
        "!=" => truth(a != b),
        "<=" => truth(a <= b),
        ">=" => truth(a >= b),
        "<" => truth(a < b),
        ">" => truth(a > b),
        "+" => a.checked_add(b),
        "-" => a.checked_sub(b),
        "*" => a.checked_mul(b),
        "/" => a.checked_div(b),
        "%" => a.checked_rem(b),
        _ => a.checked_pow(u32::try_from(b).ok()?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values are those of bash 5.2.
    #[test]
    fn precedence_is_that_of_bash() {
        let value = |name: &str| match name {
            "A" => Some(2),
            "B" => Some(7),
            _ => None,
        };
        for (text, expected) in [
            ("1 + A * 3", Some(7)),
            ("(1 + $A) * 3", Some(9)),
            ("B / A - ${B} % 4", Some(0)),
            ("2 ** 3 ** 2", Some(512)),
            ("-A - -1", Some(-1)),
            ("A > 1 && B != 7 || !0", Some(1)),
            ("A >= 3 ? 10 : 20", Some(20)),
            ("10 - 4 - 3", Some(3)),
            ("A + C", None),
            ("A / 0", None),
            ("A += 1", None),
            ("A++", None),
            ("", None),
            ("(A", None),
        ] {
            assert_eq!(evaluate(text, &value), expected, "{text}");
        }
        let deep = "(".repeat(10_000);
        assert_eq!(evaluate(&deep, &value), None);
    }
}
