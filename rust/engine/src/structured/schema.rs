//! Preparation of JSON schemas: bounds, by counting, what the compiler's own limits do not bound.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Number, Value, json};

use super::{Whitespace, size};

/// Whitespace between the parts of JSON, per place: enough for pretty-printing, and bounded so that a model cannot emit
/// it endlessly.
const WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";
/// Member in which the compiler looks for its own options.
const OPTIONS: &str = "x-guidance";

/// Maximum properties of an object; compilation and mask time grow with their square.
const MAX_PROPERTIES: usize = 1000;
/// Maximum optional properties of an object, with four parser items each.
const MAX_OPTIONAL: usize = 480;
/// Maximum `multipleOf` in units of the last decimal; the lexer has a state per remainder.
const MAX_MULTIPLE: u128 = 10_000;
/// Maximum nesting of schemas, including references; the compiler recurses with some kilobytes of stack per level.
const MAX_LEVELS: usize = 5000;

/// Compiler options that a schema inside a grammar may set.
const ALLOWED_OPTIONS: [&str; 4] = ["whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator"];

/// Largest magnitude of integer bounds in the compiler: the largest float below 2^63.
const LARGEST: i128 = (1 << 63) - 1024;
/// Integers up to here are exact in f64.
const EXACT: i128 = 1 << 53;
/// Smallest bound for which the next power of ten exceeds 64 bits.
const POWER: f64 = 1e18;
/// Members that hold data or are ignored by the compiler.
const DATA: [&str; 5] = ["const", "enum", "default", "example", "examples"];
/// Members whose own members have user-defined names and are schemas.
const NAMING: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// Maximum JSON values in a schema; compilation time of objects and lists grows faster than their number.
const MAX_VALUES: usize = 25_000;
/// Maximum regular expressions that may have to match the same text; the time to intersect them doubles with each.
const MAX_TOGETHER: usize = 12;

/// Members that combine schemas.
const COMBINING: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];

/// Members that, beside a `$ref`, apply to the same value and may contain patterns.
const JOINED: [&str; 7] = ["pattern", "format", "properties", "items", "anyOf", "oneOf", "additionalProperties"];

/// Parses a schema and adds the compiler's options. Members keep their order, which is that of the output.
pub(super) fn read(text: &str, whitespace: &Whitespace) -> Result<Value, String> {
    let mut schema: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    check(&schema)?;
    bound_integers(&mut schema, false)?;
    let options = match whitespace {
        Whitespace::Some => json!({"whitespace_pattern": WHITESPACE}),
        Whitespace::None => json!({"whitespace_flexible": false}),
        Whitespace::Pattern(pattern) => {
            size::check_regex(pattern)?;
            json!({"whitespace_pattern": pattern})
        }
    };
    match &mut schema {
        Value::Object(members) if members.contains_key(OPTIONS) => {
            return Err(format!("{OPTIONS} is not supported: it could allow output that violates the schema"));
        }
        Value::Object(members) => _ = members.insert(OPTIONS.into(), options),
        Value::Bool(true) => schema = json!({OPTIONS: options}),
        Value::Bool(false) => return Err("no value satisfies the schema false".into()),
        _ => return Err("a schema must be an object or true".into()),
    }
    Ok(schema)
}

/// Prepares a schema that is part of a grammar, where it may set separators itself.
pub(super) fn prepare(schema: &mut Value) -> Result<(), String> {
    let options = schema.get(OPTIONS).and_then(Value::as_object).into_iter().flatten();
    if let Some((name, _)) = options.into_iter().find(|(name, _)| !ALLOWED_OPTIONS.contains(&name.as_str())) {
        return Err(format!("{OPTIONS}.{name} is not supported; supported options: {}", ALLOWED_OPTIONS.join(", ")));
    }
    check(schema)?;
    bound_integers(schema, false)
}

/// Adjusts integer bounds to numbers that the compiler can handle (64 bits, via f64). The new bounds lie within the old
/// ones. `names` is true if the object's members have user-defined names.
fn bound_integers(value: &mut Value, names: bool) -> Result<(), String> {
    match value {
        Value::Array(items) => items.iter_mut().try_for_each(|item| bound_integers(item, false)),
        Value::Object(members) => {
            if !names && is_integer(members.get("type")) {
                bound_integer(members)?;
            }
            members
                .iter_mut()
                .filter(|(name, _)| names || !DATA.contains(&name.as_str()))
                .try_for_each(|(name, member)| bound_integers(member, !names && NAMING.contains(&name.as_str())))
        }
        _ => Ok(()),
    }
}

/// Returns whether a type allows integers only.
fn is_integer(kind: Option<&Value>) -> bool {
    let has = |name: &str| match kind {
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == name),
        kind => kind.is_some_and(|kind| kind == name),
    };
    has("integer") && !has("number")
}

fn bound_integer(members: &mut Map<String, Value>) -> Result<(), String> {
    let bound = |name: &str, round: fn(f64) -> f64, beyond: i128| {
        let number = members.get(name).and_then(Value::as_number)?;
        let exact = number.as_i64().map(i128::from).or(number.as_u64().map(i128::from));
        // The cast saturates far outside the supported range.
        let at = exact.or(number.as_f64().map(|float| round(float) as i128))?;
        Some((name.to_owned(), at.saturating_add(beyond)))
    };
    let lower = [bound("minimum", f64::ceil, 0), bound("exclusiveMinimum", f64::floor, 1)];
    let upper = [bound("maximum", f64::floor, 0), bound("exclusiveMaximum", f64::ceil, -1)];
    let lower = lower.into_iter().flatten().max_by_key(|found| found.1);
    let upper = upper.into_iter().flatten().min_by_key(|found| found.1);
    let is_large =
        |bound: &Option<(String, i128)>| bound.as_ref().is_some_and(|(_, at)| at.unsigned_abs() > EXACT as u128);
    if !is_large(&lower) && !is_large(&upper) {
        return Ok(());
    }
    let refused = |(name, at): (String, i128)| {
        Err(format!("{name} of an integer must be from -{LARGEST} to {LARGEST}, got {at}"))
    };
    let (mut least, mut most) = (None, None);
    if let Some((name, at)) = lower {
        if at > LARGEST {
            return refused((name, at));
        }
        let float = at.max(-LARGEST) as f64;
        least = Some(if (float as i128) < at { float.next_up() } else { float });
    }
    if let Some((name, at)) = upper {
        if at < -LARGEST {
            return refused((name, at));
        }
        let float = at.min(LARGEST) as f64;
        most = Some(if float as i128 > at { float.next_down() } else { float });
    }
    // With a single bound the compiler counts powers of ten up to one that overflows.
    let largest = LARGEST as f64;
    most = most.or(least.filter(|least| *least >= POWER).map(|_| largest));
    least = least.or(most.filter(|most| *most <= -POWER).map(|_| -largest));
    for name in ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"] {
        if members.get(name).is_some_and(Value::is_number) {
            members.remove(name);
        }
    }
    // Floats written as integers, so that they are parsed exactly.
    members.extend(least.map(|least| ("minimum".into(), Value::from(least as i64))));
    members.extend(most.map(|most| ("maximum".into(), Value::from(most as i64))));
    Ok(())
}

/// Checks the limits on compilation work.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    let mut found = SchemaStatistics::default();
    let values = count(schema);
    if values > MAX_VALUES {
        return Err(format!("it has {values} values; the limit is {MAX_VALUES}"));
    }
    found.collect(schema, "", 0)?;
    found.check_multiples()?;
    found.check_patterns()?;
    let levels = found.levels(schema);
    if levels > MAX_LEVELS {
        return Err(format!("its references nest {levels} levels deep; the limit is {MAX_LEVELS}"));
    }
    Ok(())
}

/// Statistics of a schema.
#[derive(Default)]
struct SchemaStatistics {
    multiples: Vec<Number>,
    /// Whether several may apply to one number.
    combines: bool,
    /// Distinct regular expressions by property name; those of several schemas of one property may have to match
    /// together.
    patterns: BTreeMap<String, BTreeSet<String>>,
    /// Whether several schemas apply at once.
    joins: bool,
    /// References and their maximum nesting depth.
    references: BTreeMap<String, usize>,
}

impl SchemaStatistics {
    /// Collects the statistics of a schema of property `of`.
    fn collect(&mut self, value: &Value, of: &str, depth: usize) -> Result<(), String> {
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.collect(item, of, depth + 1)),
            Value::Object(members) => members.iter().try_for_each(|(name, member)| {
                match member {
                    Value::Object(properties) if name == "properties" => {
                        check_properties(properties, members.get("required"))?;
                        return properties.iter().try_for_each(|(of, each)| self.collect(each, of, depth + 2));
                    }
                    Value::Number(number) if name == "multipleOf" => self.multiples.push(number.clone()),
                    Value::String(pattern) if name == "pattern" || name == "format" => {
                        size::check_regex(pattern)?;
                        self.patterns.entry(of.into()).or_default().insert(pattern.clone());
                    }
                    Value::Object(patterns) if name == "patternProperties" => {
                        patterns.keys().try_for_each(|pattern| size::check_regex(pattern))?;
                    }
                    Value::String(target) if name == "$ref" => {
                        let deepest = self.references.entry(target.clone()).or_default();
                        *deepest = depth.max(*deepest);
                    }
                    _ => {}
                }
                self.joins |=
                    name == "allOf" || name == "$ref" && members.keys().any(|name| JOINED.contains(&name.as_str()));
                self.combines |= COMBINING.contains(&name.as_str());
                self.collect(member, of, depth + 1)
            }),
            _ => Ok(()),
        }
    }

    fn check_patterns(&self) -> Result<(), String> {
        let most = self.patterns.iter().filter(|_| self.joins).map(|(name, patterns)| (patterns.len(), name)).max();
        match most {
            Some((count, name)) if count > MAX_TOGETHER => Err(format!(
                "{count} patterns may have to match the same text (property {name:?}); the limit is {MAX_TOGETHER} \
                 with allOf or with members beside $ref"
            )),
            _ => Ok(()),
        }
    }

    /// Checks each `multipleOf`, or their least common multiple where several may apply.
    fn check_multiples(&self) -> Result<(), String> {
        let parts: Vec<(u128, i32)> = self.multiples.iter().filter_map(digits).collect();
        let lowest = parts.iter().map(|(_, exponent)| *exponent).min().unwrap_or(0).min(0);
        let whole = |&(digits, exponent): &(u128, i32), lowest: i32| {
            let zeros = u32::try_from(exponent - lowest).unwrap_or(0);
            digits.saturating_mul(10_u128.saturating_pow(zeros))
        };
        let largest = if self.combines {
            parts.iter().fold(1, |sum, part| least_common_multiple(sum, whole(part, lowest)))
        } else {
            parts.iter().map(|part| whole(part, part.1.min(0))).max().unwrap_or(1)
        };
        if largest <= MAX_MULTIPLE {
            return Ok(());
        }
        Err(format!(
            "its multipleOf constraints combine to {largest} units of the last decimal; the limit is {MAX_MULTIPLE}"
        ))
    }

    /// Returns the maximum recursion depth of the compiler: each target of a reference is compiled once, inside
    /// whatever refers to it first.
    fn levels(&self, schema: &Value) -> usize {
        let deepest = |target: &str| {
            let target = target.strip_prefix('#').and_then(|pointer| schema.pointer(pointer)).unwrap_or(&Value::Null);
            1 + deepest_reference(target).unwrap_or(0)
        };
        self.references.keys().map(|target| deepest(target)).sum::<usize>() + deepest_reference(schema).unwrap_or(0)
    }
}

/// Checks the number of properties of an object, and of its optional ones.
fn check_properties(properties: &Map<String, Value>, required: Option<&Value>) -> Result<(), String> {
    let count = properties.len();
    if count > MAX_PROPERTIES {
        return Err(format!("an object has {count} properties; the limit is {MAX_PROPERTIES}"));
    }
    let required: BTreeSet<&str> =
        required.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let optional = properties.keys().filter(|name| !required.contains(name.as_str())).count();
    if optional > MAX_OPTIONAL {
        return Err(format!("an object has {optional} optional properties; the limit is {MAX_OPTIONAL}"));
    }
    Ok(())
}

/// Returns the number of values, including nested ones.
fn count(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(count).sum(),
        Value::Object(members) => members.values().map(count).sum(),
        _ => 0,
    }
}

/// Returns the nesting depth of the deepest reference, if any.
fn deepest_reference(value: &Value) -> Option<usize> {
    match value {
        Value::Array(items) => items.iter().filter_map(deepest_reference).max().map(|depth| depth + 1),
        Value::Object(members) => {
            let own = members.get("$ref").map(|_| 0);
            own.max(members.values().filter_map(deepest_reference).max().map(|depth| depth + 1))
        }
        _ => None,
    }
}

/// Returns a number's decimal digits as an integer and its power of ten.
fn digits(number: &Number) -> Option<(u128, i32)> {
    let text = format!("{:e}", number.as_f64()?.abs());
    let (mantissa, exponent) = text.split_once('e')?;
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let exponent = exponent.parse::<i32>().ok()? - i32::try_from(fraction.len()).ok()?;
    Some((format!("{whole}{fraction}").parse().ok()?, exponent))
}

fn least_common_multiple(a: u128, b: u128) -> u128 {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a.checked_div(divisor).map_or(0, |factor| factor.saturating_mul(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiples_are_counted_in_their_last_decimal() {
        let refused = |schema: Value| check(&schema).err().unwrap_or_default();
        for number in ["7", "0.01", "10000", "2.5e-3", "1e4", "0.9973"] {
            let number: Value = serde_json::from_str(number).unwrap();
            assert_eq!(refused(json!({"multipleOf": number})), "", "{number}");
        }
        assert!(refused(json!({"items": {"multipleOf": 10_007}})).contains("10007"));
        assert!(refused(json!({"multipleOf": 1e5})).contains("100000"));
        let two = json!([{"multipleOf": 101}, {"multipleOf": 103}]);
        assert_eq!(refused(json!({"prefixItems": two})), "");
        assert!(refused(json!({"allOf": two})).contains("10403"));
        assert!(refused(json!({"allOf": [{"multipleOf": 0.5}, {"multipleOf": 3001}]})).contains("30010"));
    }

    #[test]
    fn integer_bounds_are_clamped_to_the_supported_range() {
        let bounded = |mut schema: Value| prepare(&mut schema).map(|()| schema);
        let int = |members: Value| {
            let mut schema = json!({"type": "integer"});
            schema.as_object_mut().unwrap().extend(members.as_object().unwrap().clone());
            schema
        };
        let largest = LARGEST as f64;
        for (given, expected) in [
            (json!({"minimum": i64::MIN}), json!({"minimum": -largest})),
            (json!({"minimum": i64::MIN + 1, "maximum": i64::MAX}), json!({"minimum": -largest, "maximum": largest})),
            (json!({"minimum": 0.5, "maximum": u64::MAX}), json!({"minimum": 1.0, "maximum": largest})),
            (json!({"exclusiveMinimum": -1e19, "maximum": 0}), json!({"minimum": -largest, "maximum": 0.0})),
            (json!({"minimum": 4e18}), json!({"minimum": 4e18, "maximum": largest})),
            // 2^53 + 3 is not an f64 and the next one above exceeds the bound.
            (json!({"maximum": 9_007_199_254_740_995_i64}), json!({"maximum": 9_007_199_254_740_994.0})),
            (json!({"exclusiveMinimum": 9_007_199_254_740_992_i64}), json!({"minimum": 9_007_199_254_740_994.0})),
            (json!({"minimum": -5, "exclusiveMaximum": 7}), json!({"minimum": -5, "exclusiveMaximum": 7})),
        ] {
            let bounds = |found: &Value| ["minimum", "maximum"].map(|name| found[name].as_f64());
            let found = bounded(int(given.clone())).unwrap();
            if given.get("exclusiveMaximum").is_some() {
                assert_eq!(found, int(given));
            } else {
                assert_eq!((bounds(&found), found.get("exclusiveMinimum")), (bounds(&expected), None), "{given}");
            }
        }
        for beyond in [json!({"minimum": 1e19}), json!({"maximum": -1e19}), json!({"exclusiveMinimum": i64::MAX})] {
            let error = bounded(int(beyond.clone())).unwrap_err();
            assert!(error.contains("9223372036854774784") && error.contains("imum"), "{beyond}: {error}");
        }
        // Other schemas stay unchanged.
        let int64 = json!({"type": "integer", "minimum": i64::MIN});
        for same in [
            json!({"type": "number", "minimum": -1e30}),
            json!({"const": int64}),
            json!({"enum": [int64]}),
            json!({"properties": {"type": {"const": int64}}}),
        ] {
            assert_eq!(bounded(same.clone()), Ok(same));
        }
        let within =
            json!({"properties": {"const": int64, "a": {"items": {"type": ["integer", "null"], "minimum": -1e30}}}});
        let found = bounded(within).unwrap();
        assert_eq!(found["properties"]["const"]["minimum"], json!(-9_223_372_036_854_774_784_i64));
        assert_eq!(found["properties"]["a"]["items"]["minimum"], json!(-9_223_372_036_854_774_784_i64));
    }

    #[test]
    fn nesting_depth_counts_references() {
        let chain = |length: usize| {
            let link = |index: usize| json!({"items": {"$ref": format!("#/$defs/d{}", index + 1)}});
            let definitions = (0..length).map(|index| (format!("d{index}"), link(index)));
            json!({"$ref": "#/$defs/d0", "$defs": definitions.collect::<Map<_, _>>()})
        };
        assert_eq!(check(&chain(1000)), Ok(()));
        assert!(check(&chain(3000)).unwrap_err().contains("levels"));
    }

    #[test]
    fn properties_are_limited() {
        let wide = |count: usize, required: usize| {
            let names = (0..count).map(|index| format!("p{index}"));
            let properties: Map<_, _> = names.clone().map(|name| (name, json!({}))).collect();
            json!({"items": {"properties": properties, "required": names.take(required).collect::<Vec<_>>()}})
        };
        assert_eq!(check(&wide(1000, 520)), Ok(()));
        assert!(check(&wide(1001, 1001)).unwrap_err().contains("1001"));
        assert!(check(&wide(1000, 519)).unwrap_err().contains("481"));
    }

    #[test]
    fn enum_values_are_limited() {
        let list = |count: usize| json!({"enum": vec!["a"; count]});
        assert_eq!(check(&list(24_998)), Ok(()));
        assert!(check(&list(24_999)).unwrap_err().contains("25001 values"));
    }

    #[test]
    fn simultaneous_patterns_are_limited() {
        let patterns = |count: usize| {
            (0..count).map(|index| json!({"properties": {"a": {"pattern": format!("{index}")}}})).collect::<Vec<_>>()
        };
        assert_eq!(check(&json!({"allOf": patterns(12)})), Ok(()));
        assert!(check(&json!({"allOf": patterns(13)})).unwrap_err().contains("13 patterns"));
        assert_eq!(check(&json!({"anyOf": patterns(13)})), Ok(()));
        let chain = |index: usize| (format!("d{index}"), json!({"pattern": format!("{index}"), "$ref": "#/$defs/d"}));
        let chain = (0..13).map(chain).collect::<Map<_, _>>();
        assert!(check(&json!({"$defs": chain})).unwrap_err().contains("13 patterns"));
        assert!(check(&json!({"pattern": "a?".repeat(3000)})).unwrap_err().contains("3000 parts"));
    }
}
