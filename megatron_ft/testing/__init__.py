"""Harness for tests and benchmarks of this package, and for your tests of your own policies. No other folder of the
package imports it."""
